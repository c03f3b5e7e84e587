"""Tensor-parallel linear layers with sequence parallelism (arXiv 2205.05198).

The layers have megatron-core's weights and names. Unlike in megatron-core, the matrix product of a weight gradient also
accumulates the gradient.

Sizes: Symbols: S sequence length, B micro-batch, H and F sizes of input and output, T ranks of the tensor-parallel
group.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.distributed import ProcessGroup

from megabench.engines.common.weight_gradient import accumulate


class ColumnLinear(ColumnParallelLinear):
    """Column-parallel layer, [S/T, B, H] -> [S, B, F/T]: gather the sequence, then multiply with this rank's columns.

    The input is gathered again for the backward pass, unless the layer `keeps_gathered`.
    """

    def __init__(self, *args: Any, keeps_gathered: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keeps_gathered = keeps_gathered

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        assert weight is None and not runtime_gather_output
        group = self.tp_group if self.sequence_parallel else None
        output: Tensor = _Column.apply(input_, self.weight, group, self.keeps_gathered)
        return output if self.bias is None else output + self.bias, None


class RowLinear(RowParallelLinear):
    """Row-parallel layer, [S, B, F/T] -> [S/T, B, H]: multiply with this rank's rows, then reduce-scatter."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        assert self.bias is None
        group = self.tp_group if self.sequence_parallel else None
        output: Tensor = _Row.apply(input_, self.weight, group)
        return output, None


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, group: ProcessGroup | None, keeps_gathered: bool) -> Tensor:
        whole = _gathered(part, group)
        ctx.save_for_backward(whole if keeps_gathered else part)
        ctx.weight, ctx.group, ctx.keeps_gathered = weight, group, keeps_gathered
        return whole @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (saved,), weight, group = ctx.saved_tensors, ctx.weight, ctx.group
        # the gather overlaps with the product that does not need the gathered input
        whole, gathering = _gather(saved, None if ctx.keeps_gathered else group)
        grad_whole = grad @ weight
        _wait(gathering)
        grad_part, scattering = _scatter(grad_whole, group)
        unused = _add_weight_gradient(weight, grad, whole)
        _wait(scattering)
        return grad_part, unused, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(input_)
        ctx.weight, ctx.group = weight, group
        part, scattering = _scatter(input_ @ weight.t(), group)
        _wait(scattering)
        return part

    @staticmethod
    def backward(ctx: Any, grad_part: Tensor) -> tuple[Tensor | None, ...]:
        (input_,), weight = ctx.saved_tensors, ctx.weight
        grad = _gathered(grad_part, ctx.group)
        grad_input = grad @ weight
        return grad_input, _add_weight_gradient(weight, grad, input_), None


def _gathered(part: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather the parts of all ranks, [S/T, B, H] -> [S, B, H]."""
    whole, gathering = _gather(part, group)
    _wait(gathering)
    return whole


def _gather(part: Tensor, group: ProcessGroup | None) -> tuple[Tensor, dist.Work | None]:
    if group is None:
        return part, None
    whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, part.contiguous(), group=group, async_op=True)


def _scatter(whole: Tensor, group: ProcessGroup | None) -> tuple[Tensor, dist.Work | None]:
    if group is None:
        return whole, None
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    return part, dist.reduce_scatter_tensor(part, whole.contiguous(), group=group, async_op=True)


def _wait(work: dist.Work | None) -> None:
    if work:
        work.wait()


def _add_weight_gradient(weight: Any, grad: Tensor, inputs: Tensor) -> Tensor:
    """Add to megatron-core's gradient buffer. Return a placeholder gradient, which megatron-core ignores."""
    accumulate(weight.main_grad, grad.flatten(0, 1), inputs.flatten(0, 1))
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
