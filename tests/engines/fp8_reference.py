"""What fp8 runs are compared with: transformers' model on one process, with each linear layer rounded to fp8 by torch.

The activations are fp32 here. With bf16 ones, sums in another order would change the rounding to fp8, and hide mistakes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from megabench.config import ResolvedConfig
from megabench.engines.common.transformers_model import blocks
from megabench.precision import POLICIES
from megabench.runtime.device import DTYPES
from tests import distributed
from tests.engines.equivalence import ANY_MODEL, Trace, differences, resolve, train, train_reference
from tests.engines.reference import Reference

# A difference of 1e-7 between two fp32 sums moves about one element in a million to the next fp8 value, which is up to
# an eighth away. Each of the negative controls is above ten times this tolerance.
TOLERANCE = 3e-3


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

    fused: "list[RoundedLinear]"
    output: Tensor

    def forward(self, input: Tensor) -> Tensor:
        if self is self.fused[0]:
            outputs = _RoundedProduct.apply(input, torch.cat([layer.weight for layer in self.fused]))
            parts = outputs.split([layer.out_features for layer in self.fused], dim=-1)
            for layer, part in zip(self.fused, parts, strict=True):
                layer.output = part
        return self.output if self.bias is None else self.output + self.bias


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input_, weight)
        return rounded(input_) @ rounded(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        input_, weight = ctx.saved_tensors
        grad = rounded(grad)
        return grad @ rounded(weight), grad.flatten(0, -2).t() @ rounded(input_).flatten(0, -2)


class Fp8Reference(Reference):
    def __init__(self, run: ResolvedConfig, device: torch.device) -> None:
        super().__init__(run, device)
        for number in run.fp8_layers:
            for module in blocks(self.model, run)[number].modules():
                if type(module) is nn.Linear:
                    module.__class__, module.fused = RoundedLinear, [module]


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
    work = ("model", "num_layers", "seq_length", "micro_batch", "global_batch", "precision", "optimizer", "lr", "fp8_recipe")
    work += ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    model = FusedFp8Reference if run.spec.needs_blocks else Fp8Reference
    found = differences(traces[0], _reference(model, tuple(sorted((k, v) for k, v in fields.items() if k in work))))
    name = max(found, key=lambda key: found[key] if found[key] == found[key] else float("inf"))
    return name, found[name]
