"""Tensor-parallel linear layers with fp8 products; linear.py describes the layers.

Gathers send fp8 values under one scale of the whole group. Reduce-scatters send the dtype of the activations, because
sums of fp8 values would lose bits. The inputs of layers are saved in fp8.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megabench.engines.common.fp8 import Quantized, largest_value, product, quantize, transposed
from megabench.engines.common.fp8_linear import CastsWeight
from megabench.engines.megatron.linear import Column, ColumnLinear, Row, RowLinear, added, gather, scatter, wait


class Fp8ColumnLinear(ColumnLinear, CastsWeight):
    """ColumnLinear with fp8 products, [S/T, B, H] -> [S, B, F/T]."""

    def __init__(self, *args: Any, has_bf16_gradients: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_bf16_gradients = has_bf16_gradients

    def multiply(self, part: Tensor, group: ProcessGroup | None) -> Tensor:
        function = _Fp8ForwardColumn if self.has_bf16_gradients else _Fp8Column
        cast = self.quantized_weight(part.dtype)
        output: Tensor = function.apply(part, self.weight, group, self.keeps_gathered, cast)
        return output


class Fp8RowLinear(RowLinear, CastsWeight):
    """RowLinear with fp8 products, [S, B, F/T] -> [S/T, B, H]."""

    def __init__(self, *args: Any, has_bf16_gradients: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_bf16_gradients = has_bf16_gradients

    def multiply(self, input_: Tensor, group: ProcessGroup | None) -> Tensor:
        function = _Fp8ForwardRow if self.has_bf16_gradients else _Fp8Row
        output: Tensor = function.apply(input_, self.weight, group, self.quantized_weight(input_.dtype))
        return output


class _Fp8Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, weight: Tensor, group: ProcessGroup | None, keeps_gathered: bool, cast: Quantized
    ) -> Tensor:
        mine, whole = _gathered(part, group)
        ctx.weight, ctx.cast, ctx.group, ctx.dtype = weight, cast, group, part.dtype
        ctx.gathers_again = group is not None and not keeps_gathered
        ctx.save_for_backward(mine.columns if group is None else mine.rows if ctx.gathers_again else whole, mine.scale)
        return _multiply(whole, mine.scale, cast, part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (saved, scale), group = ctx.saved_tensors, ctx.group
        grads = quantize(grad.flatten(0, 1))
        # the gather overlaps with the product that does not need the gathered input
        whole, gathering = gather(saved.view(torch.uint8), group if ctx.gathers_again else None)
        grad_whole = _input_gradient(grads, ctx.cast, grad.shape, ctx.dtype)
        wait(gathering)
        grad_part, scattering = scatter(grad_whole, group)
        columns = saved if group is None else transposed(whole.view(saved.dtype))
        unused = _add_weight_gradient(ctx.weight, grads, columns, scale)
        wait(scattering)
        return grad_part, unused, None, None, None


class _Fp8Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, group: ProcessGroup | None, cast: Quantized) -> Tensor:
        inputs = quantize(input_.flatten(0, 1))
        ctx.save_for_backward(inputs.columns, inputs.scale)
        ctx.weight, ctx.cast, ctx.group, ctx.shape = weight, cast, group, input_.shape
        part, scattering = scatter(_multiply(inputs.rows, inputs.scale, cast, input_), group)
        wait(scattering)
        return part

    @staticmethod
    def backward(ctx: Any, grad_part: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale = ctx.saved_tensors
        mine, whole = _gathered(grad_part, ctx.group)
        grads = Quantized(whole, mine.columns if ctx.group is None else transposed(whole), mine.scale)
        grad_input = _input_gradient(grads, ctx.cast, ctx.shape, grad_part.dtype)
        return grad_input, _add_weight_gradient(ctx.weight, grads, columns, scale), None, None


class _Fp8ForwardColumn(Column):
    """Column with its forward product in fp8."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, weight: Tensor, group: ProcessGroup | None, keeps_gathered: bool, cast: Quantized
    ) -> Tensor:
        mine, whole = _gathered(part, group)
        ctx.save_for_backward(part)
        # the gathered input that the backward pass needs is not in fp8, so it cannot be kept
        ctx.weight, ctx.group, ctx.keeps_gathered = weight, group, False
        return _multiply(whole, mine.scale, cast, part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *Column.backward(ctx, grad), None


class _Fp8ForwardRow(Row):
    """Row with its forward product in fp8."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, group: ProcessGroup | None, cast: Quantized) -> Tensor:
        inputs = quantize(input_.flatten(0, 1), columns=False)
        ctx.save_for_backward(input_)
        ctx.weight, ctx.group = weight, group
        part, scattering = scatter(_multiply(inputs.rows, inputs.scale, cast, input_), group)
        wait(scattering)
        return part

    @staticmethod
    def backward(ctx: Any, grad_part: Tensor) -> tuple[Tensor | None, ...]:
        return *Row.backward(ctx, grad_part), None


def _gathered(part: Tensor, group: ProcessGroup | None) -> tuple[Quantized, Tensor]:
    """Quantize a part [S/T, B, H] under the scale of the group, and gather the rows of all parts [S·B, H].

    The result has transposed columns only without a group.
    """
    amax = largest_value(part, group)
    mine = quantize(part.flatten(0, 1), columns=group is None, amax=amax)
    assert mine.rows is not None
    whole, gathering = gather(mine.rows.view(torch.uint8), group)  # NCCL and gloo cannot send fp8
    wait(gathering)
    return mine, whole.view(mine.rows.dtype)


def _multiply(rows: Tensor | None, scale: Tensor, cast: Quantized, like: Tensor) -> Tensor:
    """Return the output [S, B, N] of a layer, given its input [S·B, K] in fp8. `like` has B and the dtype."""
    assert rows is not None and cast.rows is not None
    output = product(rows, scale, cast.rows, cast.scale, like.dtype, is_fast=True)
    return output.view(-1, like.shape[1], output.shape[1])


def _input_gradient(grads: Quantized, cast: Quantized, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the gradient [S, B, K] of a layer's input."""
    assert grads.rows is not None and cast.columns is not None
    grad = product(grads.rows, grads.scale, cast.columns, cast.scale, dtype)
    return grad.view(-1, shape[1], grad.shape[1])


def _add_weight_gradient(weight: Any, grads: Quantized, columns: Tensor, scale: Tensor) -> Tensor:
    """Add to megatron-core's gradient buffer, in its dtype, given the transposed input [K, S·B] in fp8."""
    assert grads.columns is not None
    weight.main_grad += product(grads.columns, grads.scale, columns, scale, weight.main_grad.dtype)
    return added(weight)
