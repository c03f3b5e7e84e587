"""Tensor-parallel linear layers with fp8 products; linear.py describes the layers.

Gathers send fp8 values under one scale of the whole group. Reduce-scatters send the dtype of the activations, because
sums of fp8 values would lose bits. The inputs of layers are saved in fp8.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from megabench.engines.common.fp8 import CastsWeight, Quantized, add_product, columns_of, product, quantize, transposed
from megabench.engines.megatron.linear import (
    ColumnLinear,
    ColumnProduct,
    RowLinear,
    RowProduct,
    added,
    gather,
    scatter,
    wait,
)


class _Fp8Layer(CastsWeight):
    """What both layers share. The ranks of `whole_tensor` have parts of each weight, input and gradient."""

    def __init__(self, *args: Any, has_bf16_gradients: bool, keeps_transposed: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_bf16_gradients, self.keeps_transposed = has_bf16_gradients, keeps_transposed
        group = parallel_state.get_tensor_and_context_parallel_group()
        self.whole_tensor: ProcessGroup | None = group if group.size() > 1 else None


class Fp8ColumnLinear(_Fp8Layer, ColumnLinear):
    """ColumnLinear with fp8 products, [S/T, B, H] -> [S, B, F/T]."""

    def multiply(self, part: Tensor, group: ProcessGroup | None) -> Tensor:
        function = _Fp8ForwardColumn if self.has_bf16_gradients else _Fp8Column
        output: Tensor = function.apply(part, self.weight, group, self)
        return output


class Fp8RowLinear(_Fp8Layer, RowLinear):
    """RowLinear with fp8 products, [S, B, F/T] -> [S/T, B, H]."""

    def multiply(self, input_: Tensor, group: ProcessGroup | None) -> Tensor:
        function = _Fp8ForwardRow if self.has_bf16_gradients else _Fp8Row
        output: Tensor = function.apply(input_, self.weight, group, self)
        return output


class _Fp8Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, group: ProcessGroup | None, layer: Fp8ColumnLinear) -> Tensor:
        mine, whole = _gathered(part, group, layer.whole_tensor)
        ctx.weight, ctx.cast, ctx.group, ctx.dtype = weight, _cast(layer, part), group, part.dtype
        ctx.whole_tensor = layer.whole_tensor
        ctx.gathers_again = group is not None and not layer.keeps_gathered
        ctx.save_for_backward(mine.columns if group is None else mine.rows if ctx.gathers_again else whole, mine.scale)
        return _multiply(whole, mine.scale, ctx.cast, part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (saved, scale), group = ctx.saved_tensors, ctx.group
        grads = quantize(grad, group=ctx.whole_tensor)
        # the gather overlaps with the product that does not need the gathered input
        whole, gathering = gather(saved.view(torch.uint8), group if ctx.gathers_again else None)
        grad_whole = _input_gradient(grads, ctx.cast, grad.shape, ctx.dtype)
        wait(gathering)
        grad_part, scattering = scatter(grad_whole, group)
        columns = saved if group is None else transposed(whole.view(saved.dtype))
        unused = _add_weight_gradient(ctx.weight, grads, columns, scale)
        wait(scattering)
        return grad_part, unused, None, None


class _Fp8Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, group: ProcessGroup | None, layer: Fp8RowLinear) -> Tensor:
        inputs = quantize(input_, group=layer.whole_tensor)
        ctx.save_for_backward(inputs.columns, inputs.scale)
        ctx.weight, ctx.cast, ctx.group, ctx.shape = weight, _cast(layer, input_), group, input_.shape
        ctx.whole_tensor = layer.whole_tensor
        part, scattering = scatter(_multiply(inputs.rows, inputs.scale, ctx.cast, input_), group)
        wait(scattering)
        return part

    @staticmethod
    def backward(ctx: Any, grad_part: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale = ctx.saved_tensors
        mine, whole = _gathered(grad_part, ctx.group, ctx.whole_tensor)
        grads = Quantized(whole, mine.columns if ctx.group is None else transposed(whole), mine.scale)
        grad_input = _input_gradient(grads, ctx.cast, ctx.shape, grad_part.dtype)
        return grad_input, _add_weight_gradient(ctx.weight, grads, columns, scale), None, None


class _Fp8ForwardColumn(torch.autograd.Function):
    """ColumnProduct with its forward product in fp8."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, group: ProcessGroup | None, layer: Fp8ColumnLinear) -> Tensor:
        mine, whole = _gathered(part, group, layer.whole_tensor, columns=False)
        ctx.save_for_backward(part)
        ctx.weight, ctx.group, ctx.keeps_gathered = weight, group, False  # backward gathers the input in bf16
        return _multiply(whole, mine.scale, _cast(layer, part), part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ColumnProduct.backward(ctx, grad)


class _Fp8ForwardRow(torch.autograd.Function):
    """RowProduct with its forward product in fp8."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, group: ProcessGroup | None, layer: Fp8RowLinear) -> Tensor:
        inputs = quantize(input_, columns=False, group=layer.whole_tensor)
        ctx.save_for_backward(input_)
        ctx.weight, ctx.group = weight, group
        part, scattering = scatter(_multiply(inputs.rows, inputs.scale, _cast(layer, input_), input_), group)
        wait(scattering)
        return part

    @staticmethod
    def backward(ctx: Any, grad_part: Tensor) -> tuple[Tensor | None, ...]:
        return *RowProduct.backward(ctx, grad_part), None


def _cast(layer: _Fp8Layer, like: Tensor) -> Quantized:
    """Return the weight in fp8, whose parts are on the tensor-parallel ranks. All context-parallel ranks agree."""
    return layer.quantized_weight(like.dtype, layer.whole_tensor)


def _gathered(
    part: Tensor, group: ProcessGroup | None, whole_tensor: ProcessGroup | None, columns: bool = True
) -> tuple[Quantized, Tensor]:
    """Quantize a part [S/T, B, H] under the scale of the whole tensor, and gather the rows of all parts [S·B, H].

    The result has transposed columns only without a group, because gathered rows are transposed later.
    """
    mine = quantize(part, columns=columns and group is None, group=whole_tensor)
    whole, gathering = gather(mine.rows.view(torch.uint8), group)  # gloo cannot send fp8
    wait(gathering)
    return mine, whole.view(mine.rows.dtype)


def _multiply(rows: Tensor, scale: Tensor, cast: Quantized, like: Tensor) -> Tensor:
    """Return the output [S, B, N] of a layer, given its input [S·B, K] in fp8. B and the dtype are those of `like`."""
    output = product(rows, scale, cast.rows, cast.scale, like.dtype, is_fast=True)
    return output.view(-1, like.shape[1], output.shape[1])


def _input_gradient(grads: Quantized, cast: Quantized, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the gradient [S, B, K] of a layer's input."""
    grad = product(grads.rows, grads.scale, columns_of(cast), cast.scale, dtype)
    return grad.view(-1, shape[1], grad.shape[1])


def _add_weight_gradient(weight: Any, grads: Quantized, columns: Tensor, scale: Tensor) -> Tensor:
    """Add to megatron-core's gradient buffer, in its dtype, given the transposed input [K, S·B] in fp8."""
    add_product(weight.main_grad, grads.columns, grads.scale, columns, scale)
    return added(weight)
