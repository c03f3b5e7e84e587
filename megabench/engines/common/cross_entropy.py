"""Fused output layer and cross-entropy for all engines. The logits of all tokens are never stored at once.

The forward pass also computes the gradients of each chunk of tokens, while the chunk's logits are in memory (as in
Liger, arXiv 2410.10989). The vocabulary may be divided over a tensor-parallel group (as in arXiv 1909.08053, section
3).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megabench.engines.common.kernels import accumulate, fused

_CHUNK_LOGITS = 2**28  # elements of one chunk of logits at most: 0.5 GiB in bf16
_CHUNK_MULTIPLE = 256  # tokens; a multiple of the tile size of matrix products


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: ProcessGroup | None = None,
    num_real_rows: int | None = None,
    chunk_tokens: int | None = None,
    weight_gradient: Tensor | None = None,
    weight_factor: float = 1.0,
) -> Tensor:
    """Return the mean cross-entropy of `labels` [N] under softmax(hidden [N, H] · weightᵀ), an fp32 scalar in nats.

    `weight` [V, H] is this rank's part of the vocabulary. The ranks of `group` hold equal parts in rank order, and all
    ranks get the same loss. The gradient of `hidden` must be summed over the group. Rows from `num_real_rows` on are
    padding and get no probability. Logits are rounded to the dtype of `hidden`. All later operations use fp32.

    If a tensor `weight_gradient` [V, H] is given, the forward pass computes the gradient of `weight`, multiplies it by
    `weight_factor` and adds it to this tensor. The backward pass then returns no gradient of `weight`.
    """
    rows = weight.shape[0]
    chunk = chunk_tokens or max(_CHUNK_LOGITS // rows // _CHUNK_MULTIPLE, 1) * _CHUNK_MULTIPLE
    real = rows if num_real_rows is None else num_real_rows
    needs_grads = hidden.requires_grad or weight.requires_grad or weight_gradient is not None
    with_grads = torch.is_grad_enabled() and needs_grads
    loss: Tensor = _LinearCrossEntropy.apply(
        hidden, weight, labels, group, real, chunk, with_grads, weight_gradient, weight_factor
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        group: ProcessGroup | None,
        num_real_rows: int,
        chunk: int,
        with_grads: bool,
        weight_gradient: Tensor | None,
        weight_factor: float,
    ) -> Tensor:
        rows = weight.shape[0]
        size = group.size() if group else 1
        first_row = rows * group.rank() if group else 0
        losses = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if with_grads else None
        # without a given tensor, the backward pass scales the gradient
        grad_weight, factor = weight_gradient, weight_factor / len(labels)
        if with_grads and grad_weight is None:
            grad_weight, factor = torch.zeros_like(weight, dtype=torch.float32), 1.0
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            logits = hidden[part] @ weight.t()
            logits[:, num_real_rows:] = -torch.inf
            local = labels[part] - first_row
            is_here = (local >= 0) & (local < rows)
            local = local.clamp(0, rows - 1)
            target = logits.gather(1, local[:, None]).squeeze(1).float().where(is_here, 0.0)
            log_sum = fused(_log_sum_exp, logits)(logits)
            if group and size > 1:
                mine = torch.stack([log_sum, target])
                everyone = torch.empty(size * 2, len(target), device=mine.device)
                dist.all_gather_into_tensor(everyone, mine, group=group)
                log_sum, target = everyone[0::2].logsumexp(0), everyone[1::2].sum(0)
            losses[part] = log_sum - target
            if grad_hidden is not None and grad_weight is not None:
                # the gradient with respect to the logits, times the number of tokens, is softmax minus 1 at the label
                grads = fused(_to_softmax, logits)(logits, log_sum)
                grads[torch.arange(len(local), device=local.device), local] -= is_here.to(grads.dtype)
                torch.mm(grads, weight, out=grad_hidden[part])
                accumulate(grad_weight, grads, hidden[part], factor)
                del grads
            del logits  # free these logits before the next chunk is computed
        ctx.save_for_backward(grad_hidden, grad_weight if weight_gradient is None else None)
        ctx.num_tokens, ctx.dtype = len(labels), weight.dtype
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_loss / ctx.num_tokens
        scaled = fused(_scaled, grad_hidden)
        of_weight = None if grad_weight is None else scaled(grad_weight, scale, ctx.dtype)
        return scaled(grad_hidden, scale, grad_hidden.dtype), of_weight, None, None, None, None, None, None, None


def _log_sum_exp(logits: Tensor) -> Tensor:
    """[C, V] -> [C] in fp32."""
    return logits.float().logsumexp(1)


def _to_softmax(logits: Tensor, log_sum: Tensor) -> Tensor:
    """Replace the logits [C, V] by their probabilities, given their log-sum-exp [C]."""
    return logits.copy_(torch.exp(logits.float() - log_sum[:, None]))


def _scaled(grads: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (grads * scale).to(dtype)
