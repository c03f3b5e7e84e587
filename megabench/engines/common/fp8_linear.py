"""Linear layers with fp8 products for transformers models.

Sizes: Symbols: M tokens, K input size, N output size of a layer.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megabench.engines.common.fp8 import (
    CastsWeight,
    Fp8Weight,
    Quantized,
    columns_of,
    largest_value,
    product,
    quantize,
    transposed,
)

# attribute in which an activation keeps its fp8 values: the version of the activation, and a Quantized
_HELD = "_megabench_fp8"


class Fp8Linear(nn.Linear, CastsWeight):
    """nn.Linear with fp8 products, [..., K] -> [..., N]. `nn.Linear` objects become instances by `use_fp8`.

    A layer that `keeps_casts` casts its weight once per step. Otherwise, the weight exists only while it is used. It is
    an Fp8Weight, or it is cast in each forward and each backward pass.
    """

    keeps_casts: bool

    def forward(self, input: Tensor) -> Tensor:
        quantized = _quantized_activation(input, columns=not self.has_bf16_gradients)
        output: Tensor
        if isinstance(self.weight, Fp8Weight):
            output = _Fp8WeightProduct.apply(input, self.weight, *quantized, self.weight.rows, self.weight.scale)
        else:
            # torch.compile does not support a cache that outlives the graph
            keeps_cast = self.keeps_casts and not torch.compiler.is_compiling()
            cast = self.quantized_weight(input.dtype) if keeps_cast else None
            function = _Fp8Forward if self.has_bf16_gradients else _Fp8Product
            output = function.apply(input, self.weight, *quantized, cast)
        return output if self.bias is None else output + self.bias


def use_fp8(block: nn.Module, keeps_casts: bool, has_bf16_gradients: bool, keeps_transposed: bool = True) -> None:
    """Turn the linear layers of a block into Fp8Linear layers, which keep their parameters."""
    for module in block.modules():
        if type(module) is nn.Linear:
            module.__class__ = Fp8Linear
            assert isinstance(module, Fp8Linear)
            module.keeps_casts, module.keeps_transposed = keeps_casts, keeps_transposed
            module.has_bf16_gradients = has_bf16_gradients


def _quantized_activation(activation: Tensor, columns: bool) -> Quantized:
    """Quantize an activation [..., K] into rows, and into columns if asked, once for all layers that read it."""
    if torch.compiler.is_compiling():  # which removes repeated operations itself
        return quantize(activation.detach(), columns=columns)
    version, held = getattr(activation, _HELD, (None, None))
    if held is None or version != activation._version:
        with torch.no_grad():  # detach() would lose a remembered amax
            held = quantize(activation, columns=columns)
        setattr(activation, _HELD, (activation._version, held))
    return held


class _Fp8Product(torch.autograd.Function):
    """input · weightᵀ with all three products in fp8. The input is saved in fp8 only."""

    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, scale: Tensor, cast: Quantized | None
    ) -> Tensor:
        amax = largest_value(weight.to(input_.dtype)) if cast is None else None
        used = cast or quantize(weight.to(input_.dtype), columns=False, amax=amax)
        ctx.save_for_backward(columns, scale, weight, amax)
        ctx.cast, ctx.dtype = cast, input_.dtype
        return _output(input_, rows, scale, used.rows, used.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale, weight, amax = ctx.saved_tensors
        used = ctx.cast or quantize(weight.to(ctx.dtype), rows=False, amax=amax)
        return *_gradients(grad, columns, scale, columns_of(used), used.scale, weight.dtype), None, None, None, None


class _Fp8WeightProduct(torch.autograd.Function):
    """_Fp8Product for an Fp8Weight, whose rows are transposed for the gradient of the input."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        weight: Tensor,
        rows: Tensor,
        columns: Tensor,
        scale: Tensor,
        weight_rows: Tensor,
        weight_scale: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(columns, scale, weight_rows, weight_scale)
        ctx.weight_dtype = weight.dtype
        return _output(input_, rows, scale, weight_rows, weight_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale, weight_rows, weight_scale = ctx.saved_tensors
        gradients = _gradients(grad, columns, scale, transposed(weight_rows), weight_scale, ctx.weight_dtype)
        return *gradients, None, None, None, None, None


def _output(input_: Tensor, rows: Tensor, scale: Tensor, weight_rows: Tensor, weight_scale: Tensor) -> Tensor:
    """Return input [..., K] · weightᵀ as [..., N], from the rows of both in fp8."""
    output = product(rows, scale, weight_rows, weight_scale, input_.dtype, is_fast=True)
    return output.view(*input_.shape[:-1], -1)


def _gradients(
    grad: Tensor,
    columns: Tensor,
    scale: Tensor,
    weight_columns: Tensor,
    weight_scale: Tensor,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input [..., K] and weight [N, K], given that of the output [..., N].

    `columns` [K, M] and `weight_columns` [K, N] are the transposed input and weight in fp8.
    """
    grads = quantize(grad)
    grad_input = product(grads.rows, grads.scale, weight_columns, weight_scale, grad.dtype)
    grad_weight = product(grads.columns, grads.scale, columns, scale, weight_dtype)
    return grad_input.view(*grad.shape[:-1], -1), grad_weight


class _Fp8Forward(torch.autograd.Function):
    """input · weightᵀ in fp8, with both products of the backward pass in the dtype of the input."""

    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, scale: Tensor, cast: Quantized | None
    ) -> Tensor:
        used = cast or quantize(weight.to(input_.dtype), columns=False)
        ctx.save_for_backward(input_.detach(), weight)  # the input itself would keep its fp8 values in memory
        return _output(input_, rows, scale, used.rows, used.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input_, weight = ctx.saved_tensors
        grad_weight = grad.flatten(0, -2).t() @ input_.flatten(0, -2)
        return grad @ weight.to(grad.dtype), grad_weight.to(weight.dtype), None, None, None, None
