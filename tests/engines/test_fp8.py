"""Every layout and engine in fp8 does what one process with rounded linear layers does, and mistakes are caught."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megabench.config import ConfigError, ResolvedConfig
from megabench.engines.common import fp8, fp8_linear
from megabench.engines.common.fp8 import Fp8Weight, Quantized
from megabench.engines.common.fp8_format import quantization_scale
from megabench.engines.common.kernels import names_for_megatron, names_for_transformers
from megabench.engines.common.swiglu import swiglu
from megabench.engines.common.transformers_blocks import Fp8SwiGLUMLP
from megabench.engines.fsdp import fp8_gather
from megabench.engines.megatron.exchange import Collectives
from megabench.precision import POLICIES
from megabench.runtime.device import DeviceError, check_precision
from tests.engines.equivalence import OPTIMIZERS, Trace, resolve
from tests.engines.fp8_reference import TOLERANCE, rounded, train_fp8, worst_difference
from tests.engines.test_equivalence import COMBINATIONS, LAYOUTS
from tests.exhaustive import with_representatives

ADAMW = OPTIMIZERS["adamw"]
MEGATRON = {
    **{name: case for name, case in (LAYOUTS | COMBINATIONS).items() if "vocabulary" not in case[1].get("model", "")},
    "tp2-keep-gathered": (2, {"tp": 2, "keep_gathered": True}),
    "tp2-transposed-in-backward": (2, {"tp": 2, "keep_transposed": False}),
    "tp2-copy-engines": (2, {"tp": 2, "tp_overlap": "copy-engines"}),
    "tp4-copy-engines": (4, {"tp": 4, "tp_overlap": "copy-engines", "keep_transposed": False}),
    "tp2-recompute": (2, {"tp": 2, "recompute": "full"}),
    "tp2-recompute-selective": (2, {"tp": 2, "recompute": "selective"}),
    "qwen2": (2, {"tp": 2, "model": "qwen2-tiny"}),
    "qwen3": (2, {"tp": 2, "model": "qwen3-tiny"}),
}
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"zero-{stage}": (2, {"engine": "deepspeed", "zero_stage": stage}) for stage in (1, 2, 3)},
    "zero-2-transposed-in-backward": (2, {"engine": "deepspeed", "zero_stage": 2, "keep_transposed": False}),
    "ddp-transposed-in-backward": (2, {"engine": "ddp", "keep_transposed": False}),
    "zero-3-recompute": (2, {"engine": "deepspeed", "zero_stage": 3, "recompute": "full"}),
    "fsdp": (2, {"engine": "fsdp"}),
    "fsdp-compile": (2, {"engine": "fsdp", "compile": True}),
    "fsdp-recompute": (2, {"engine": "fsdp", "recompute": "full"}),
    "fsdp-offload": (2, {"engine": "fsdp", "offload": "all"}),
    "fsdp-kept": (2, {"engine": "fsdp", "reshard_after_forward": False, "global_batch": 8}),
    "fsdp-large-steps": (2, {"engine": "fsdp", "lr": 0.1}),
    "hsdp": (4, {"engine": "fsdp", "shard_size": 2}),
    "ddp": (2, {"engine": "ddp"}),
    "ddp-recompute": (2, {"engine": "ddp", "recompute": "full"}),
    "megatron-fsdp": (2, {"engine": "megatron_fsdp"}),
}
RECIPES: list[dict[str, Any]] = [
    {"fp8_recipe": "bf16-gradients"},
    {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2},
]


LAYOUTS_IN_CI = (
    *("tp2", "tp2-dp2", "cp2", "pp2-vp2", "tp2-pp2-vp2", "cp3-chunks", "dp4-shards-of-2"),
    *("tp2-keep-gathered", "tp2-copy-engines", "tp4-copy-engines", "tp2-transposed-in-backward"),
    *("tp2-recompute-selective", "qwen3"),
)
ENGINES_IN_CI = (*("zero-2", "zero-3", "zero-3-recompute", "fsdp", "fsdp-offload", "hsdp", "ddp", "megatron-fsdp"),)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", with_representatives(MEGATRON, *LAYOUTS_IN_CI))
def test_megatron(layout: str) -> None:
    world_size, fields = MEGATRON[layout]
    assert_equal(world_size, fields)


@pytest.mark.distributed
@pytest.mark.parametrize("engine", with_representatives(ENGINES, *ENGINES_IN_CI))
def test_engines(engine: str) -> None:
    world_size, fields = ENGINES[engine]
    assert_equal(world_size, fields)


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "vp": 2}, {"engine": "fsdp"}], ids=str)
def test_recipes(layout: dict[str, Any], recipe: dict[str, Any]) -> None:
    assert_equal(2, layout | recipe)


def assert_equal(world_size: int, fields: dict[str, Any]) -> None:
    name, difference = worst_difference(world_size, **ADAMW | fields)
    assert difference < TOLERANCE, f"{name} differs by {difference:.1e}"


def _stale_amax() -> AbstractContextManager[Any]:
    """Activations and gradients with the amax of the previous tensor, as under delayed scaling."""
    compute = fp8.largest_value
    last: list[Tensor] = []

    def stale(tensor: Tensor) -> Tensor:
        last.append(compute(tensor))
        return last[max(0, len(last) - 2)]

    return patch.object(fp8, "largest_value", stale)


def _amax_of_one_rank() -> AbstractContextManager[Any]:
    """Each rank has a scale of its own, but the gathered parts have the scale of the first rank."""
    return patch.object(Collectives, "largest", lambda self, value: value)


def _stale_weights() -> AbstractContextManager[Any]:
    """The fp8 casts of the first step are used in the second."""
    from megabench.engines.megatron import engine

    return patch.object(engine, "forget_casts", lambda model: None)


def _transposed_operand() -> AbstractContextManager[Any]:
    """Square weights in the wrong order of their dimensions."""
    quantize = fp8.quantize

    def swapped(matrix: Tensor, *args: Any, **kwargs: Any) -> Quantized:
        result = quantize(matrix, *args, **kwargs)
        is_square = matrix.shape[0] == matrix.shape[1]
        return Quantized(result.columns, result.rows, result.scale) if is_square else result

    return patch.object(fp8, "quantize", swapped)


def _amax_of_one_shard() -> AbstractContextManager[Any]:
    """Under FSDP2, each rank casts its rows under the scale of these rows."""
    return patch.object(fp8_gather, "_reduce_amaxes", lambda amaxes: None)


def _stale_weight_amax() -> AbstractContextManager[Any]:
    """Under FSDP2, the scales of the first step are used in the second."""
    compute = fp8_gather.Fp8Shards.update_scales
    done: list[None] = []

    def update_once(shards: fp8_gather.Fp8Shards) -> None:
        if not done:
            done.append(compute(shards))

    return patch.object(fp8_gather.Fp8Shards, "update_scales", update_once)


@contextmanager
def _e5m2_gradients() -> Iterator[None]:
    """Gradients with two bits of mantissa instead of three."""
    from megabench.engines.megatron.fp8_linear import _Fp8Column, _Fp8Row

    def coarse(gradient: Tensor) -> Tensor:
        scale = quantization_scale(gradient.abs().max())
        return (gradient * scale).to(torch.float8_e5m2).to(gradient.dtype) / scale

    def backward(original: Callable[..., Any]) -> Any:
        return staticmethod(lambda ctx, gradient: original(ctx, coarse(gradient)))

    with (
        patch.object(_Fp8Column, "backward", backward(_Fp8Column.backward)),
        patch.object(_Fp8Row, "backward", backward(_Fp8Row.backward)),
    ):
        yield


CONTROLS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], dict[str, Any]]] = {
    "stale amax": (_stale_amax, {}),
    "amax of one rank": (_amax_of_one_rank, {"tp": 2}),
    "stale weights": (_stale_weights, {"lr": 0.01}),  # with smaller updates, few elements would change
    "transposed operand": (_transposed_operand, {}),
    "E5M2 gradients": (_e5m2_gradients, {}),
    "amax of one shard": (_amax_of_one_shard, {"engine": "fsdp"}),
    "stale weight amax": (_stale_weight_amax, {"engine": "fsdp", "lr": 0.1}),  # weights more than double in a step
}


def train_with(mistake: str, run: ResolvedConfig) -> Trace:
    with CONTROLS[mistake][0]():
        return train_fp8(run)


@pytest.mark.distributed
@pytest.mark.parametrize("mistake", CONTROLS)
def test_mistakes_are_caught(mistake: str) -> None:
    fields = CONTROLS[mistake][1]
    _, difference = worst_difference(2, partial(train_with, mistake), **ADAMW | fields)
    assert not difference < 5 * TOLERANCE, f"{mistake}: {difference:.1e}"


@pytest.mark.parametrize("size", [(16, 16), (48, 80)])
def test_quantizes_both_layouts(size: tuple[int, int]) -> None:
    matrix = torch.randn(size) * 1e-4
    result = fp8.quantize(matrix)
    assert torch.equal(result.rows.float() * result.scale, rounded(matrix))
    assert torch.equal(result.columns.float() * result.scale, rounded(matrix).t())
    assert torch.dist(rounded(matrix), matrix) / matrix.norm() < 2**-4
    assert result.rows.float().abs().max() >= 448 / 2, "more than half of the range is unused"


@pytest.mark.parametrize("exponent", [-99, -20, 0, 100])
def test_scales_are_the_largest_powers_of_two_that_fit(exponent: int) -> None:
    amaxes = (1 + torch.arange(128) / 128) * 2.0**exponent
    scales = quantization_scale(amaxes)
    assert torch.equal(scales, 2.0 ** torch.floor(torch.log2(448.0 / amaxes.double())).float())


def test_quantizes_zeros() -> None:
    result = fp8.quantize(torch.zeros(16, 16))
    assert not result.rows.float().any() and result.scale.isfinite()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_stays_visible(value: float) -> None:
    matrix = torch.randn(16, 16)
    matrix[2, 3] = value
    result = fp8.quantize(matrix)
    assert (result.rows.float() * result.scale)[2, 3].isnan()


def test_a_remembered_amax_is_used_until_the_tensor_changes() -> None:
    tensor = torch.randn(2, 8, 16)
    fp8.remember_largest_value(tensor, torch.tensor(7.0))
    assert fp8.largest_value(tensor) == 7.0
    assert fp8.quantize(tensor).scale == 1 / quantization_scale(torch.tensor(7.0))
    tensor *= 2
    assert fp8.largest_value(tensor) == tensor.abs().max()


class _Reader(torch.autograd.Function):
    """A linear layer's part: it asks for the amax of its output's gradient."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.seen = seen
        return input_.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append((fp8.largest_value(grad), grad.abs().max()))
        return grad, None


@pytest.mark.parametrize("num_inputs", [1, 2])
def test_linear_layers_know_the_amaxes_that_swiglu_found(num_inputs: int) -> None:
    inputs = [part.requires_grad_() for part in torch.randn(2, 8, 64).chunk(num_inputs, dim=-1)]
    seen: list[tuple[Tensor, Tensor]] = []
    with patch.object(fp8, "_largest_value", wraps=fp8._largest_value) as found:
        output = swiglu(*(_Reader.apply(part, seen) for part in inputs), finds_amax=True)
        assert fp8.largest_value(output) == output.abs().max()
        (output * torch.randn_like(output)).sum().backward()
    assert len(seen) == num_inputs and all(told == expected for told, expected in seen)
    assert found.call_count == 1 + num_inputs, "a linear layer read its tensor once more"


def test_no_tensor_is_read_for_its_amax_after_swiglu() -> None:
    mlp = nn.Module()
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))
    mlp.__class__ = Fp8SwiGLUMLP
    fp8_linear.use_fp8(mlp, keeps_casts=True, has_bf16_gradients=False)
    with patch.object(fp8, "_largest_value", wraps=fp8._largest_value) as found:
        mlp(torch.randn(2, 8, 16, requires_grad=True)).sum().backward()
    # three weights, the input, SwiGLU's output and two gradients, which SwiGLU finds itself, and the output's gradient
    assert found.call_count == 3 + 1 + 1 + 2 + 1


def test_a_changed_activation_is_quantized_again() -> None:
    layer = nn.Linear(16, 16, bias=False)
    block = nn.Sequential(layer)
    fp8_linear.use_fp8(block, keeps_casts=True, has_bf16_gradients=False)
    activation = torch.randn(16, 16)
    first = layer(activation)
    assert torch.equal(layer(activation), first)
    activation *= 3
    assert torch.equal(layer(activation), rounded(activation) @ rounded(layer.weight.detach()).t())


def test_a_weight_in_fp8_only_has_no_elements_to_read() -> None:
    rows = torch.zeros(32, 16, dtype=torch.float8_e4m3fn)
    weight = Fp8Weight(rows, torch.ones(()), torch.bfloat16)
    assert repr(weight) == "Fp8Weight([32, 16], torch.bfloat16)"
    with pytest.raises(NotImplementedError, match="exists only in fp8"):
        weight + 1


@pytest.mark.parametrize("keeps_transposed", [True, False])
def test_the_transposed_weight_is_kept_if_asked(keeps_transposed: bool) -> None:
    linear: Any = nn.Linear(16, 32, bias=False)
    block = nn.Sequential(linear)
    fp8_linear.use_fp8(block, keeps_casts=True, has_bf16_gradients=False, keeps_transposed=keeps_transposed)
    block(torch.randn(8, 16, requires_grad=True)).sum().backward()
    assert linear._cast.columns.numel() == (16 * 32 if keeps_transposed else 0)


def test_bf16_gradients_keep_no_fp8_values_for_the_backward_pass() -> None:
    linear: Any = nn.Linear(16, 16, bias=False)
    block = nn.Sequential(linear)
    fp8_linear.use_fp8(block, keeps_casts=True, has_bf16_gradients=True)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(torch.randn(8, 16, requires_grad=True))
    assert saved and not any(hasattr(tensor, fp8_linear._HELD) for tensor in saved)
    assert not linear._cast.columns.numel(), "no product needs the transposed weight"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"precision": "bf16", "fp8_recipe": "tensorwise"}, "fp8_recipe=tensorwise works only with precision=fp8"),
    ({"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2}, "leave none of the 4 layers in fp8"),
    ({"kernels": "reference"}, "does not work with kernels=reference; use kernels=auto"),
    ({"precision": "bf16", "keep_transposed": False}, "only with precision=fp8 and fp8_recipe=tensorwise; omit it"),
    ({"fp8_recipe": "bf16-gradients", "keep_transposed": False}, "only with precision=fp8 and fp8_recipe=tensorwise"),
    ({"engine": "deepspeed", "keep_transposed": False}, "ZeRO-3 and compiled blocks do not keep them"),
    ({"engine": "ddp", "compile": True, "keep_transposed": False}, "ZeRO-3 and compiled blocks do not keep them"),
    ({"seq_length": 8}, "multiples of 16, but micro_batch·seq_length=8 / cp=1 is 8"),
    ({"model": "gpt2-tiny", "engine": "ddp"}, "gpt2-tiny has no linear layers in fp8; use precision=bf16"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=str)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(1, **{"precision": "fp8"} | fields)


@pytest.mark.parametrize("names", [names_for_megatron, names_for_transformers])
def test_the_record_says_that_cpus_emulate_fp8(names: Callable[[ResolvedConfig], dict[str, str]]) -> None:
    assert names(resolve(1, precision="fp8"))["fp8_products"] == "emulated on CPU: fp8 values, multiplied in fp32"
    assert "fp8_products" not in names(resolve(1, precision="bf16"))


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (8, 9)])
def test_gpus_before_hopper_are_refused(capability: tuple[int, int]) -> None:
    with (
        patch.object(torch.cuda, "device_count", return_value=1),
        patch.object(torch.cuda, "get_device_capability", return_value=capability),
        patch.object(torch.cuda, "get_device_name", return_value="NVIDIA A100"),
        pytest.raises(DeviceError, match=r"needs Hopper GPUs or newer ones, but .* has NVIDIA A100"),
    ):
        check_precision(POLICIES["fp8"], "cuda")
