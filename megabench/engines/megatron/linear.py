"""Tensor-parallel linear layers with sequence parallelism (arXiv 2205.05198).

The layers have the same parameters as megatron-core's layers, with the same names. Unlike in megatron-core, the matrix
product of a weight gradient adds its result to the gradient buffer.

Sizes: Symbols: S sequence length, B micro-batch, H and F sizes of input and output, T ranks of the tensor-parallel
group.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.distributed import ProcessGroup

from megabench.engines.common.kernels import accumulate
from megabench.engines.megatron.exchange import Alone, Collectives, Exchange, Gathering, Messages

Way = Literal["nccl", "copy-engines"]


class ColumnLinear(ColumnParallelLinear):
    """Column-parallel layer, [S/T, B, H] -> [S, B, F/T]: gather the sequence, then multiply with this rank's columns.

    The input is gathered again for the backward pass, unless the layer `keeps_gathered`.
    """

    def __init__(self, *args: Any, keeps_gathered: bool, way: Way, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keeps_gathered = keeps_gathered
        self.exchange = exchange_of(self.tp_group if self.sequence_parallel else None, way)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        assert weight is None and not runtime_gather_output
        output = self.multiply(input_)
        return output if self.bias is None else output + self.bias, None

    def multiply(self, part: Tensor) -> Tensor:
        output: Tensor = ColumnProduct.apply(part, self.weight, self.exchange, self.keeps_gathered)
        return output


class RowLinear(RowParallelLinear):
    """Row-parallel layer, [S, B, F/T] -> [S/T, B, H]: multiply with this rank's rows, then reduce-scatter."""

    def __init__(self, *args: Any, way: Way, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exchange = exchange_of(self.tp_group if self.sequence_parallel else None, way)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        assert self.bias is None
        return self.multiply(input_), None

    def multiply(self, input_: Tensor) -> Tensor:
        output: Tensor = RowProduct.apply(input_, self.weight, self.exchange)
        return output


def exchange_of(group: ProcessGroup | None, way: Way) -> Exchange:
    """Return the exchange between the ranks of a group, or that of one rank without a group."""
    if group is None:
        return Alone()
    if way == "nccl":
        return Collectives(group)
    if dist.get_backend(group) != "nccl":
        return Messages(group)
    from megabench.engines.megatron.copy_engines import copy_engines  # only for GPUs

    return copy_engines(group)


class ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, exchange: Exchange, keeps_gathered: bool) -> Tensor:
        gathering = exchange.gather(part)
        ctx.save_for_backward(gathering.whole if keeps_gathered else part)
        ctx.weight, ctx.exchange, ctx.keeps_gathered = weight, exchange, keeps_gathered
        return _products(gathering, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (saved,), weight, exchange = ctx.saved_tensors, ctx.weight, ctx.exchange
        # the gather overlaps with the product that does not need the gathered input
        gathering = (Alone() if ctx.keeps_gathered else exchange).gather(saved)
        finish = exchange.reduce_scatter(lambda rows: grad[rows] @ weight, len(grad))
        unused = _add_weight_gradient(weight, grad, gathering.wait())
        return finish(), unused, None, None


class RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, exchange: Exchange) -> Tensor:
        ctx.save_for_backward(input_)
        ctx.weight, ctx.exchange = weight, exchange
        return exchange.reduce_scatter(lambda rows: input_[rows] @ weight.t(), len(input_))()

    @staticmethod
    def backward(ctx: Any, grad_part: Tensor) -> tuple[Tensor | None, ...]:
        (input_,), weight = ctx.saved_tensors, ctx.weight
        gathering = ctx.exchange.gather(grad_part)
        grad_input = _products(gathering, weight)
        return grad_input, _add_weight_gradient(weight, gathering.whole, input_), None


def _products(gathering: Gathering, matrix: Tensor) -> Tensor:
    """Multiply a tensor [S, B, K] that is being gathered by a matrix [K, N], each part when it has arrived."""

    def multiply(rows: Tensor, output: Tensor) -> None:
        torch.mm(rows.flatten(0, 1), matrix, out=output.flatten(0, 1))

    return multiplied(gathering, multiply, (*gathering.whole.shape[:-1], matrix.shape[1]), gathering.whole.dtype)


def multiplied(
    gathering: Gathering, multiply: Callable[[Tensor, Tensor], None], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return a tensor of this shape. `multiply` computes some of its rows from the same rows of the gathered tensor."""
    output = torch.empty(shape, dtype=dtype, device=gathering.whole.device)
    for rows, part in gathering:
        multiply(part, output[rows])
    return output


def _add_weight_gradient(weight: Any, grad: Tensor, inputs: Tensor) -> Tensor:
    accumulate(weight.main_grad, grad.flatten(0, 1), inputs.flatten(0, 1))
    return added(weight)


def added(weight: Any) -> Tensor:
    """Report that the gradient was added to megatron-core's buffer. megatron-core ignores the returned placeholder."""
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
