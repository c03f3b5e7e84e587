"""Tensor-parallel linear layers with sequence parallelism (arXiv 2205.05198).

The layers have the same parameters as megatron-core's layers, with the same names. Unlike in megatron-core, the matrix
product of a weight gradient also accumulates the gradient.

Sizes: Symbols: S sequence length, B micro-batch, H and F sizes of input and output, T ranks of the tensor-parallel
group.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.distributed import ProcessGroup

from megabench.engines.common.kernels import accumulate


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
        output = self.multiply(input_, self.tp_group if self.sequence_parallel else None)
        return output if self.bias is None else output + self.bias, None

    def multiply(self, part: Tensor, group: ProcessGroup | None) -> Tensor:
        output: Tensor = ColumnProduct.apply(part, self.weight, group, self.keeps_gathered)
        return output


class RowLinear(RowParallelLinear):
    """Row-parallel layer, [S, B, F/T] -> [S/T, B, H]: multiply with this rank's rows, then reduce-scatter."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        assert self.bias is None
        return self.multiply(input_, self.tp_group if self.sequence_parallel else None), None

    def multiply(self, input_: Tensor, group: ProcessGroup | None) -> Tensor:
        output: Tensor = RowProduct.apply(input_, self.weight, group)
        return output


class ColumnProduct(torch.autograd.Function):
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
        whole, gathering = gather(saved, None if ctx.keeps_gathered else group)
        grad_whole = grad @ weight
        wait(gathering)
        grad_part, scattering = scatter(grad_whole, group)
        unused = _add_weight_gradient(weight, grad, whole)
        wait(scattering)
        return grad_part, unused, None, None


class RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(input_)
        ctx.weight, ctx.group = weight, group
        part, scattering = scatter(input_ @ weight.t(), group)
        wait(scattering)
        return part

    @staticmethod
    def backward(ctx: Any, grad_part: Tensor) -> tuple[Tensor | None, ...]:
        (input_,), weight = ctx.saved_tensors, ctx.weight
        grad = _gathered(grad_part, ctx.group)
        grad_input = grad @ weight
        return grad_input, _add_weight_gradient(weight, grad, input_), None


def _gathered(part: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather the parts of all ranks, [S/T, B, H] -> [S, B, H]."""
    whole, gathering = gather(part, group)
    wait(gathering)
    return whole


def gather(part: Tensor, group: ProcessGroup | None) -> tuple[Tensor, dist.Work | None]:
    """Start to gather the parts of all ranks, or return the part itself without a group."""
    if group is None:
        return part, None
    whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, part.contiguous(), group=group, async_op=True)


def scatter(whole: Tensor, group: ProcessGroup | None) -> tuple[Tensor, dist.Work | None]:
    """Start to sum the tensors of all ranks into one part per rank, or return the tensor itself without a group."""
    if group is None:
        return whole, None
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    return part, dist.reduce_scatter_tensor(part, whole.contiguous(), group=group, async_op=True)


def wait(work: dist.Work | None) -> None:
    if work:
        work.wait()


def _add_weight_gradient(weight: Any, grad: Tensor, inputs: Tensor) -> Tensor:
    accumulate(weight.main_grad, grad.flatten(0, 1), inputs.flatten(0, 1))
    return added(weight)


def added(weight: Any) -> Tensor:
    """Report that the gradient was added to megatron-core's buffer. megatron-core ignores the returned placeholder."""
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
