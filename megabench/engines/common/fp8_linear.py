"""Linear layers with fp8 products for transformers models, the fp8 casts of weights, and weights gathered in fp8.

Sizes: Symbols: K input size, N output size of a layer.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megabench.engines.common.fp8 import Quantized, largest_value, product, quantize, transposed

_HELD = "_megabench_fp8"  # attribute of an activation that was quantized: its version and its Quantized


class CastsWeight(nn.Module):
    """A layer whose weight [N, K] is cast to fp8 once per step, in both layouts.

    `forget_casts` must be called before the first forward pass after the weights changed.
    """

    weight: Tensor
    _cast: Quantized | None = None

    def quantized_weight(self, dtype: torch.dtype, group: ProcessGroup | None = None) -> Quantized:
        """Return the weight in fp8. The ranks of `group` have parts of it.

        The weight is rounded to `dtype` first, so that the result does not depend on the dtype of its storage.
        """
        if self._cast is None:
            self._cast = quantize(self.weight.detach().to(dtype), group=group)
        return self._cast


def forget_casts(model: nn.Module) -> None:
    """Discard the fp8 casts of all weights, which the next forward pass creates again."""
    for module in model.modules():
        if isinstance(module, CastsWeight):
            module._cast = None


class Fp8Weight(Tensor):
    """A weight [N, K] that exists only in fp8, as `rows` · `scale`. Its gradient is a plain tensor in its `dtype`.

    The class declares its parts to torch.compile (see `__tensor_flatten__` in torch's documentation).
    """

    rows: Tensor
    scale: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type["Fp8Weight"], rows: Tensor, scale: Tensor, dtype: torch.dtype) -> "Fp8Weight":
        weight: Fp8Weight = Tensor._make_wrapper_subclass(
            cls, rows.shape, strides=rows.stride(), dtype=dtype, device=rows.device
        )
        weight.rows, weight.scale = rows, scale
        return weight

    def __repr__(self) -> str:  # type: ignore[override]  # torch.compile prints it, and no operation reads its elements
        return f"Fp8Weight({list(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["rows", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> "Fp8Weight":
        return Fp8Weight(parts["rows"], parts["scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> "Fp8Weight":
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default):
            raise NotImplementedError(f"{func} of a weight that exists only in fp8")
        weight, *others = args
        return Fp8Weight(func(weight.rows, *others, **(kwargs or {})), weight.scale, weight.dtype)


class Fp8Linear(nn.Linear, CastsWeight):
    """nn.Linear with fp8 products, [..., K] -> [..., N]. `nn.Linear` objects become instances by `use_fp8`.

    A layer that `keeps_casts` casts its weight once per step. Otherwise, the weight exists only while it is used. It is
    an Fp8Weight, or it is cast in each forward and each backward pass.
    """

    keeps_casts: bool
    has_bf16_gradients: bool

    def forward(self, input: Tensor) -> Tensor:
        quantized = _quantized_activation(input)
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


def use_fp8(block: nn.Module, keeps_casts: bool, has_bf16_gradients: bool) -> None:
    """Turn the linear layers of a block into Fp8Linear layers, which keep their parameters."""
    for module in block.modules():
        if type(module) is nn.Linear:
            module.__class__ = Fp8Linear
            assert isinstance(module, Fp8Linear)
            module.keeps_casts, module.has_bf16_gradients = keeps_casts, has_bf16_gradients


def _quantized_activation(activation: Tensor) -> Quantized:
    """Quantize an activation [..., K] into both layouts, once for all layers that read the same tensor."""
    if torch.compiler.is_compiling():  # which removes repeated operations itself
        return quantize(activation.detach())
    version, held = getattr(activation, _HELD, (None, None))
    if held is None or version != activation._version:
        with torch.no_grad():  # detach() would lose a remembered amax
            held = quantize(activation)
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
        return product(rows, scale, used.rows, used.scale, input_.dtype, is_fast=True).view(*input_.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale, weight, amax = ctx.saved_tensors
        grads = quantize(grad)
        used = ctx.cast or quantize(weight.to(ctx.dtype), rows=False, amax=amax)
        grad_input = product(grads.rows, grads.scale, used.columns, used.scale, ctx.dtype)
        grad_weight = product(grads.columns, grads.scale, columns, scale, weight.dtype)
        return grad_input.view(*grad.shape[:-1], -1), grad_weight, None, None, None, None


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
        ctx.dtype, ctx.weight_dtype = input_.dtype, weight.dtype
        return product(rows, scale, weight_rows, weight_scale, input_.dtype, is_fast=True).view(*input_.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale, weight_rows, weight_scale = ctx.saved_tensors
        grads = quantize(grad)
        grad_input = product(grads.rows, grads.scale, transposed(weight_rows), weight_scale, ctx.dtype)
        grad_weight = product(grads.columns, grads.scale, columns, scale, ctx.weight_dtype)
        return grad_input.view(*grad.shape[:-1], -1), grad_weight, None, None, None, None, None


class _Fp8Forward(torch.autograd.Function):
    """input · weightᵀ in fp8, with both products of the backward pass in the dtype of the input."""

    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, scale: Tensor, cast: Quantized | None
    ) -> Tensor:
        used = cast or quantize(weight.to(input_.dtype), columns=False)
        ctx.save_for_backward(input_, weight)
        return product(rows, scale, used.rows, used.scale, input_.dtype, is_fast=True).view(*input_.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input_, weight = ctx.saved_tensors
        grad_weight = grad.flatten(0, -2).t() @ input_.flatten(0, -2)
        return grad @ weight.to(grad.dtype), grad_weight.to(weight.dtype), None, None, None, None
