"""The ends of a tensor-parallel model: the embedding, and the output layer with the loss.

Sizes: Symbols: B micro-batch, S sequence length, H hidden size, V vocabulary size, T ranks of the tensor-parallel
group.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from torch import Tensor

from megabench.engines.common.cross_entropy import linear_cross_entropy
from megabench.engines.megatron.exchange import Alone, Exchange
from megabench.engines.megatron.linear import added


class ParallelEmbedding(VocabParallelEmbedding):
    """An embedding whose rows [V/T, H] are on the ranks. Its output is the sum over all ranks.

    The row of the padding token gets no gradient, as in transformers' nn.Embedding. The output layer still updates this
    row of a tied weight.
    """

    exchange: Exchange
    padding_token: int | None

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [S/T, B, H] under sequence parallelism, else [B, S, H]."""
        if isinstance(self.exchange, Alone):
            return F.embedding(tokens, self.weight, self.padding_token)
        num_rows = len(self.weight)
        rows = tokens.t() - self.vocab_start_index
        rows = rows.masked_fill((rows < 0) | (rows >= num_rows), num_rows)
        padding = None if self.padding_token is None else self.padding_token - self.vocab_start_index
        hidden: Tensor = _SummedRows.apply(self.weight, rows, padding, self.exchange)
        return hidden


class _SummedRows(torch.autograd.Function):
    """Looks up `rows` [S, B] in a rank's weight. The number after the last row stands for a row of another rank."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, padding: int | None, exchange: Exchange) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows, ctx.padding, ctx.exchange = len(weight), padding, exchange

        def look_up(part: slice) -> Tensor:
            hidden = F.embedding(rows[part].clamp(max=len(weight) - 1), weight)
            return hidden.masked_fill_((rows[part] == len(weight)).unsqueeze(-1), 0)

        return exchange.reduce_scatter(look_up, len(rows))()

    @staticmethod
    def backward(ctx: Any, grad_part: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), unused = ctx.saved_tensors, ctx.num_rows
        grad = ctx.exchange.gather(grad_part).wait()
        if ctx.padding is not None:
            rows = rows.masked_fill(rows == ctx.padding, unused)
        of_rows = torch.ops.aten.embedding_dense_backward(grad, rows, ctx.num_rows + 1, unused, False)
        return of_rows[:-1], None, None, None


class ParallelLossHead(ColumnParallelLinear):
    """An output layer fused with the loss: [S/tp, B, H] -> the mean cross-entropy of `labels` [B, S].

    The model calls this layer like any other, so that megatron-core's hooks handle its weight.
    """

    exchange: Exchange
    labels: Tensor
    num_real_rows: int
    # the factor by which the engine multiplies the loss before the backward pass; None if the factor is not constant
    loss_factor: float | None = None

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        hidden = _Gathered.apply(input_, self.exchange).flatten(0, 1)
        weight = self.weight if weight is None else weight
        compute = partial(
            linear_cross_entropy,
            labels=self.labels.t().flatten(),
            group=self.tp_group,
            num_real_rows=self.num_real_rows,
        )
        if self.loss_factor is None or not torch.is_grad_enabled():
            return compute(hidden, weight), None
        main_grad: Tensor = weight.main_grad  # type: ignore[union-attr]
        loss = compute(hidden, weight.detach(), weight_gradient=main_grad, weight_factor=self.loss_factor)
        return _WithAddedGradient.apply(loss, weight, self.loss_factor), None


class _WithAddedGradient(torch.autograd.Function):
    """Returns the loss. The backward pass tells megatron-core that `main_grad` contains the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: Tensor, factor: float) -> Tensor:
        ctx.weight, ctx.factor = weight, factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # another factor would make the gradient of the weight wrong; the host does not wait for this check
        torch._assert_async(torch.isclose(grad_loss, torch.full_like(grad_loss, ctx.factor)))
        return grad_loss, added(ctx.weight), None


class _Gathered(torch.autograd.Function):
    """Gathers the sequence, [S/T, B, H] -> [S, B, H]. The result is only valid until the next layer's exchange."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        whole = exchange.gather(part).wait()
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.reduce_scatter(lambda rows: grad[rows], len(grad))(), None
