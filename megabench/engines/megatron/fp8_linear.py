"""Tensor-parallel linear layers with fp8 products; linear.py describes the layers.

All-gathers send fp8 values, which have one scale in the whole group. Reduce-scatters send the dtype of the activations,
because sums of fp8 values would lose bits. The inputs of layers are saved in fp8.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from megabench.engines.common.fp8 import (
    CastsWeight,
    Quantized,
    add_product,
    columns_of,
    product,
    quantize,
    transposed,
)
from megabench.engines.megatron.exchange import Alone, Exchange, Gathering, largest_of
from megabench.engines.megatron.linear import ColumnLinear, ColumnProduct, RowLinear, RowProduct, added, multiplied


class _Fp8Layer(CastsWeight):
    """What both layers share. The ranks have parts of each weight, input and gradient."""

    exchange: Exchange

    def __init__(self, *args: Any, has_bf16_gradients: bool, keeps_transposed: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_bf16_gradients, self.keeps_transposed = has_bf16_gradients, keeps_transposed
        # with context parallelism, an input or a gradient is divided over more ranks than exchange its parts
        self._more_ranks: ProcessGroup | None = None
        if parallel_state.get_context_parallel_world_size() > 1:
            self._more_ranks = parallel_state.get_tensor_and_context_parallel_group()

    def largest_value(self, tensor: Tensor) -> Tensor:
        mine = super().largest_value(tensor)
        return largest_of(mine, self._more_ranks) if self._more_ranks else self.exchange.largest(mine)

    def quantize(self, tensor: Tensor, columns: bool = True) -> Quantized:
        """Quantize a part of an input or of a gradient with the scale of the whole tensor."""
        return quantize(tensor, columns=columns, amax=self.largest_value(tensor))


class Fp8ColumnLinear(_Fp8Layer, ColumnLinear):
    """ColumnLinear with fp8 products, [S/T, B, H] -> [S, B, F/T]."""

    def multiply(self, part: Tensor) -> Tensor:
        function = _Fp8ForwardColumn if self.has_bf16_gradients else _Fp8Column
        output: Tensor = function.apply(part, self.weight, self)
        return output


class Fp8RowLinear(_Fp8Layer, RowLinear):
    """RowLinear with fp8 products, [S, B, F/T] -> [S/T, B, H]."""

    def multiply(self, input_: Tensor) -> Tensor:
        function = _Fp8ForwardRow if self.has_bf16_gradients else _Fp8Row
        output: Tensor = function.apply(input_, self.weight, self)
        return output


class _Fp8Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, layer: Fp8ColumnLinear) -> Tensor:
        ctx.is_alone = isinstance(layer.exchange, Alone)
        mine = layer.quantize(part, columns=ctx.is_alone)
        ctx.weight, ctx.layer, ctx.cast, ctx.dtype = weight, layer, layer.quantized_weight(part.dtype), part.dtype
        gathering = _gather(mine, layer.exchange)
        own = mine.columns if ctx.is_alone else mine.rows
        saved = gathering.whole.view(own.dtype) if layer.keeps_gathered and not ctx.is_alone else own
        ctx.save_for_backward(saved, mine.scale)
        return _products(gathering, mine, ctx.cast.rows, ctx.cast.scale, part, is_fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (saved, scale), cast, layer = ctx.saved_tensors, ctx.cast, ctx.layer
        grads = layer.quantize(grad)
        # the gather overlaps with the product that does not need the gathered input
        gathering = (Alone() if layer.keeps_gathered else layer.exchange).gather(saved.view(torch.uint8))

        weight_columns = columns_of(cast)

        def input_gradient(rows: slice) -> Tensor:
            return product(grads.rows[rows], grads.scale, weight_columns, cast.scale, ctx.dtype)

        finish = layer.exchange.reduce_scatter(input_gradient, len(grads.rows))
        columns = saved if ctx.is_alone else transposed(gathering.wait().view(saved.dtype))
        unused = _add_weight_gradient(ctx.weight, grads, columns, scale)
        grad_part = finish()
        return grad_part.view(-1, grad.shape[1], grad_part.shape[1]), unused, None


class _Fp8Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, layer: Fp8RowLinear) -> Tensor:
        inputs = layer.quantize(input_)
        ctx.save_for_backward(inputs.columns, inputs.scale)
        ctx.weight, ctx.layer, ctx.cast = weight, layer, layer.quantized_weight(input_.dtype)
        return _summed(inputs, ctx.cast, layer.exchange, input_)

    @staticmethod
    def backward(ctx: Any, grad_part: Tensor) -> tuple[Tensor | None, ...]:
        (columns, scale), cast, layer = ctx.saved_tensors, ctx.cast, ctx.layer
        is_alone = isinstance(layer.exchange, Alone)
        mine = layer.quantize(grad_part, columns=is_alone)
        gathering = _gather(mine, layer.exchange)
        grad_input = _products(gathering, mine, columns_of(cast), cast.scale, grad_part)
        whole = gathering.whole.view(mine.rows.dtype)
        grads = Quantized(whole, mine.columns if is_alone else transposed(whole), mine.scale)
        return grad_input, _add_weight_gradient(ctx.weight, grads, columns, scale), None


class _Fp8ForwardColumn(torch.autograd.Function):
    """ColumnProduct with its forward product in fp8."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, layer: Fp8ColumnLinear) -> Tensor:
        mine = layer.quantize(part, columns=False)
        ctx.save_for_backward(part)
        ctx.weight, ctx.exchange, ctx.keeps_gathered = weight, layer.exchange, False  # backward gathers in bf16
        cast = layer.quantized_weight(part.dtype)
        return _products(_gather(mine, layer.exchange), mine, cast.rows, cast.scale, part, is_fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ColumnProduct.backward(ctx, grad)[:3]


class _Fp8ForwardRow(torch.autograd.Function):
    """RowProduct with its forward product in fp8."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, layer: Fp8RowLinear) -> Tensor:
        inputs = layer.quantize(input_, columns=False)
        ctx.save_for_backward(input_)
        ctx.weight, ctx.exchange = weight, layer.exchange
        return _summed(inputs, layer.quantized_weight(input_.dtype), layer.exchange, input_)

    @staticmethod
    def backward(ctx: Any, grad_part: Tensor) -> tuple[Tensor | None, ...]:
        return RowProduct.backward(ctx, grad_part)


def _gather(mine: Quantized, exchange: Exchange) -> Gathering:
    """Start to gather the rows [S/T·B, K] of all ranks, as bytes, because gloo cannot send fp8."""
    return exchange.gather(mine.rows.view(torch.uint8))


def _products(
    gathering: Gathering, mine: Quantized, right: Tensor, right_scale: Tensor, like: Tensor, is_fast: bool = False
) -> Tensor:
    """Multiply rows [S·B, K] that are being gathered by `right` [N, K] in fp8, each part when it has arrived.

    Return [S, B, N]. B and the dtype are those of `like`, and the scale of all rows is that of this rank's rows.
    """

    def multiply(rows: Tensor, output: Tensor) -> None:
        product(rows.view(mine.rows.dtype), mine.scale, right, right_scale, like.dtype, is_fast, output)

    output = multiplied(gathering, multiply, (len(gathering.whole), len(right)), like.dtype)
    return output.view(-1, like.shape[1], len(right))


def _summed(inputs: Quantized, cast: Quantized, exchange: Exchange, like: Tensor) -> Tensor:
    """Multiply rows [S·B, K] by the weight in fp8, and reduce-scatter the products of all ranks: [S/T, B, N].

    B and the dtype are those of `like`.
    """

    def multiply(rows: slice) -> Tensor:
        return product(inputs.rows[rows], inputs.scale, cast.rows, cast.scale, like.dtype, is_fast=True)

    part = exchange.reduce_scatter(multiply, len(inputs.rows))()
    return part.view(-1, like.shape[1], part.shape[1])


def _add_weight_gradient(weight: Any, grads: Quantized, columns: Tensor, scale: Tensor) -> Tensor:
    """Add to megatron-core's gradient buffer, in its dtype, given the transposed input [K, S·B] in fp8."""
    add_product(weight.main_grad, grads.columns, grads.scale, columns, scale)
    return added(weight)
