"""Linear layers cut over a tensor-parallel group, with sequence parallelism (arXiv 2205.05198).

They hold megatron-core's weights under its names. What differs is how a step goes: weight gradients are summed up by
the product that makes them, and collectives can run inside the matrix products that they feed or follow.

Sizes: S sequence, B micro-batch, H and F sizes of input and output, T ranks of the group.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.distributed import ProcessGroup

from megabench.engines.weight_gradient import accumulate


class ColumnLinear(ColumnParallelLinear):
    """[S/T, B, H] -> [S, B, F/T]: gathers the sequence, then multiplies with its columns of the weight."""

    def __init__(self, *args: Any, overlap: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.overlap = overlap

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        assert weight is None and not runtime_gather_output
        group = self.tp_group if self.sequence_parallel else None
        output: Tensor = _Column.apply(input_, self.weight, group, self.overlap)
        return output if self.bias is None else output + self.bias, None


class RowLinear(RowParallelLinear):
    """[S, B, F/T] -> [S/T, B, H]: multiplies with its rows of the weight, then sums over the group and scatters."""

    def __init__(self, *args: Any, overlap: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.bias is None
        self.overlap = overlap

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        group = self.tp_group if self.sequence_parallel else None
        output: Tensor = _Row.apply(input_, self.weight, group, self.overlap)
        return output, None


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, group: ProcessGroup | None, overlap: bool) -> Tensor:
        ctx.save_for_backward(part)
        ctx.weight, ctx.group = weight, group
        return _gathered_product(part, weight.t(), group, overlap, keep=False)[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (part,), weight, group = ctx.saved_tensors, ctx.weight, ctx.group
        whole, gathering = _gather(part, group)  # beside the product that does not need it
        grad_whole = grad @ weight
        _wait(gathering)
        grad_part, scattering = _scatter(grad_whole, group)
        unused = _add_weight_gradient(weight, grad, whole)
        _wait(scattering)
        return grad_part, unused, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, group: ProcessGroup | None, overlap: bool) -> Tensor:
        ctx.save_for_backward(input_)
        ctx.weight, ctx.group, ctx.overlap = weight, group, overlap
        return _scattered_product(input_, weight.t(), group, overlap)

    @staticmethod
    def backward(ctx: Any, grad_part: Tensor) -> tuple[Tensor | None, ...]:
        (input_,), weight = ctx.saved_tensors, ctx.weight
        grad, grad_input = _gathered_product(grad_part, weight, ctx.group, ctx.overlap)
        return grad_input, _add_weight_gradient(weight, grad, input_), None, None


def _gathered_product(
    part: Tensor, matrix: Tensor, group: ProcessGroup | None, overlap: bool, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """The parts of all ranks, [S/T, B, H] -> [S, B, H], to keep or not, and their product with `matrix`."""
    if group and overlap:
        name = _symmetric(group)  # imports the operation, too
        whole, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
            part.contiguous(), [matrix], gather_dim=0, group_name=name, return_A=keep
        )
        return whole, product
    whole, gathering = _gather(part, group)
    _wait(gathering)
    return whole, whole @ matrix


def _scattered_product(whole: Tensor, matrix: Tensor, group: ProcessGroup | None, overlap: bool) -> Tensor:
    """This rank's part of the sum of all ranks' products, [S, B, F] -> [S/T, B, H]."""
    if group and overlap:
        name = _symmetric(group)
        summed: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            whole.contiguous(), matrix, "sum", scatter_dim=0, group_name=name
        )
        return summed
    part, scattering = _scatter(whole @ matrix, group)
    _wait(scattering)
    return part


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


def _add_weight_gradient(weight: Tensor, grad: Tensor, inputs: Tensor) -> Tensor:
    """Adds to the sum that megatron-core keeps, and returns what it then ignores as the weight's gradient."""
    accumulate(weight.main_grad, grad.flatten(0, 1), inputs.flatten(0, 1))  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


def _symmetric(group: ProcessGroup) -> Any:
    """The group's name, its ranks ready to read each other's memory; never by NVLink's multicast."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory

    name: Any = group.group_name
    if not _symmetric_memory.is_symm_mem_enabled_for_group(name):
        _symmetric_memory.enable_symm_mem_for_group(name)
    return name
