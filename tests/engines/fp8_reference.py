"""What fp8 runs are compared with: transformers' model in one process, whose linear layers torch rounds to fp8.

The activations are fp32 here. With bf16 ones, sums in another order would change the rounding to fp8 and hide
mistakes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from megabench.config import ResolvedConfig
from megabench.engines.common.transformers_blocks import blocks
from megabench.precision import POLICIES
from megabench.runtime.device import DTYPES
from tests import distributed
from tests.engines.equivalence import ANY_MODEL, Trace, differences, resolve, train, train_reference
from tests.engines.reference import Reference

# Most layouts agree to 1e-6. In some, a sum in another order moves one element to the next fp8 value, an eighth away.
# The gradients of all earlier layers then differ by about 1%. Each negative control differs by more than 10%.
TOLERANCE = 2e-2
# the settings that change results
WORK = (
    *("model", "num_layers", "seq_length", "micro_batch", "global_batch", "optimizer", "lr"),
    *("precision", "fp8_recipe", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
)


@contextmanager
def fp32_activations() -> Iterator[None]:
    """Make fp8 runs compute in fp32 outside of the products of linear layers."""
    policy = replace(POLICIES["fp8"], compute="fp32")
    with patch.dict(POLICIES, fp8=policy), patch.dict(DTYPES, fp8=torch.float32):
        yield


def train_fp8(run: ResolvedConfig, num_steps: int = 2) -> Trace:
    with fp32_activations():
        return train(run, num_steps)


def rounded(values: Tensor) -> Tensor:
    """The values that E4M3 has for a tensor, under a power of two as its scale."""
    scale = 2.0 ** torch.floor(torch.log2(448.0 / values.abs().max()))
    return (values * scale).to(torch.float8_e4m3fn).to(values.dtype) / scale


class RoundedLinear(nn.Linear):
    """One of the layers that an engine multiplies with in one product, so that their gradients have one scale."""

    recipe: str | None
    fused: "list[RoundedLinear]"
    output: Tensor

    def forward(self, input: Tensor) -> Tensor:
        if self is self.fused[0]:
            outputs = _RoundedProduct.apply(input, torch.cat([layer.weight for layer in self.fused]), self.recipe)
            parts = outputs.split([layer.out_features for layer in self.fused], dim=-1)
            for layer, part in zip(self.fused, parts, strict=True):
                layer.output = part
        return self.output if self.bias is None else self.output + self.bias


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, recipe: str | None) -> Tensor:
        ctx.backward_rounds = rounded if recipe == "tensorwise" else lambda values: values
        ctx.save_for_backward(input_, weight)
        return rounded(input_) @ rounded(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad, input_, weight = map(ctx.backward_rounds, (grad, *ctx.saved_tensors))
        return grad @ weight, grad.flatten(0, -2).t() @ input_.flatten(0, -2), None


class Fp8Reference(Reference):
    def __init__(self, run: ResolvedConfig, device: torch.device) -> None:
        super().__init__(run, device)
        for number in run.fp8_layers:
            for module in blocks(self.model, run)[number].modules():
                if type(module) is nn.Linear:
                    module.__class__ = RoundedLinear
                    rounded_linear = cast(RoundedLinear, module)
                    rounded_linear.recipe, rounded_linear.fused = run.fp8_recipe, [rounded_linear]


class FusedFp8Reference(Fp8Reference):
    """The reference of engines with parallel layers."""

    def __init__(self, run: ResolvedConfig, device: torch.device) -> None:
        super().__init__(run, device)
        for number in run.fp8_layers:
            layers = dict(blocks(self.model, run)[number].named_modules())
            for names in (
                [f"self_attn.{name}_proj" for name in ("q", "k", "v")],
                [f"mlp.{name}_proj" for name in ("gate", "up")],
            ):
                for name in names:
                    layers[name].fused = [layers[name] for name in names]


@lru_cache(maxsize=8)
def _reference(model: type[Fp8Reference], fields: tuple[tuple[str, Any], ...]) -> Trace:
    with fp32_activations():
        return train_reference(resolve(1, engine=ANY_MODEL, **dict(fields)), 2, model)


def worst_difference(world_size: int, job: Any = train_fp8, **fields: Any) -> tuple[str, float]:
    """The largest relative difference between the ranks' run and the reference, and where it is."""
    fields = {"precision": "fp8", **fields}
    run = resolve(world_size, **fields)
    traces = distributed.run(job, world_size, run)
    model = FusedFp8Reference if run.spec.needs_blocks else Fp8Reference
    found = differences(traces[0], _reference(model, tuple(sorted((k, v) for k, v in fields.items() if k in WORK))))
    name = max(found, key=lambda key: found[key] if found[key] == found[key] else float("inf"))
    return name, found[name]
