"""The traits of kernels that a record has agree with the names of the kernels beside them."""

from typing import Any

import pytest

from megabench.config import RunConfig
from megabench.engines.common import kernels
from megabench.record import KernelTraits
from tests.engines.cases import cases

RUNS: dict[str, dict[str, Any]] = cases("KERNELS")


def traits_of(names: dict[str, str]) -> dict[str, bool | None]:
    """What the names of kernels say about their traits."""

    def is_fused(operation: str, *plain: str) -> bool | None:
        name = names.get(operation, "transformers")
        return None if name == "transformers" else not any(words in name for words in plain)

    weight_gradient = names.get("weight_gradient", "")
    adds = weight_gradient in ("apex", "summed up by its product")
    return {
        "flash_attention": is_fused("attention", "eager", "unfused"),
        "fused_norm": is_fused("norm", "transformers RMSNorm", "transformers LlamaRMSNorm"),
        "fused_activation": is_fused("activation", "unfused"),
        "fused_loss": is_fused("cross_entropy", "fp32 logits"),
        "exchanges_heads": "part of the heads" in names["attention"],
        "fuses_weight_gradient": adds,
        "adds_output_gradient": adds and "except that of the output layer" not in weight_gradient,
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("has_liger", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_traits_agree_with_names(name: str, has_liger: bool, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda module: module if has_liger else None)
    monkeypatch.setattr(kernels, "kernel_name", lambda *of: "cuDNN 9.19.0")  # this machine may have no GPU
    run = RunConfig(**RUNS[name]).resolve(8, device)
    megatron = run.engine == "megatron"
    names = (kernels.names_for_megatron if megatron else kernels.names_for_transformers)(run)
    traits = (kernels.traits_for_megatron if megatron else kernels.traits_for_transformers)(run)
    assert traits == KernelTraits.model_validate(traits_of(names))
