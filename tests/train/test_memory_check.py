"""A run that cannot fit is refused before its model is built."""

from typing import Any

import pytest

from megabench.config import ResolvedConfig, RunConfig
from megabench.models.catalog import get_model
from megabench.train import memory_check
from megabench.train.memory_check import MemoryCheckError, check_memory, state_bytes


def resolve(world_size: int = 1, **fields: Any) -> ResolvedConfig:
    return RunConfig(model="llama3-8b", device="cpu", **fields).resolve(world_size, "cpu")


PARAMETERS = get_model("llama3-8b").num_parameters


@pytest.mark.parametrize(
    ("world_size", "fields", "bytes_per_parameter"),
    [
        (1, {}, 16),  # fp32 weights, gradients and two moments
        (1, {"optimizer": "sgd"}, 8),
        (2, {"tp": 2}, 8),
        (4, {"tp": 2, "engine": "megatron"}, 4 + 2),  # the optimizer is sharded over two replicas
        (4, {"engine": "deepspeed"}, 4),
        (4, {"engine": "fsdp"}, 4),
        (4, {"engine": "ddp"}, 16),
    ],
)
def test_the_state_of_a_rank(world_size: int, fields: dict[str, Any], bytes_per_parameter: float) -> None:
    state, on_host = state_bytes(resolve(world_size, **fields), world_size)
    gathered = 0.35 if fields.get("engine") in ("deepspeed", "fsdp") else 0.02  # a few whole layers
    assert state / PARAMETERS == pytest.approx(bytes_per_parameter, rel=gathered) and on_host == 0


def test_it_is_refused_with_the_figures_and_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "available_host_bytes", lambda: 23 * 10**9)
    with pytest.raises(MemoryCheckError, match=r"llama3-8b needs about 128 GB on this host, which has 23 GB; use .*"):
        check_memory(resolve(), 0, 1)
    check_memory(resolve(4, engine="deepspeed", num_layers=1, optimizer="sgd"), 0, 2)
    with pytest.raises(MemoryCheckError, match="needs about 128 GB"):
        check_memory(resolve(2, tp=2), 0, 2)  # both ranks are on this host
    check_memory(resolve(16, tp=8, pp=2), 0, 1)


def test_offloaded_state_counts_for_the_host() -> None:
    run = RunConfig(model="llama3-8b", engine="deepspeed", offload="all").resolve(8, "cuda")
    state, on_host = state_bytes(run, 8)
    assert state < 2 * PARAMETERS and on_host / PARAMETERS == pytest.approx(2 + 4 + 12)
