"""Threads of a process that keeps an optimizer in host memory."""

import os

import pytest
import torch

from megabench.config import RunConfig
from megabench.train.main import _set_threads

NUM_CORES = os.cpu_count() or 1


@pytest.mark.parametrize(
    ("given", "offload", "expected"),
    [
        ("1", "optimizer", NUM_CORES // 2),  # torchrun's
        (None, "all", NUM_CORES // 2),
        ("7", "all", None),  # somebody's own
        ("1", "none", None),
    ],
)
def test_offloaded_optimizers_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, given: str | None, offload: str, expected: int | None
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    run = RunConfig.parse({"model": "llama-tiny", "engine": "deepspeed", "offload": offload}).resolve(2, "cuda")
    _set_threads(run)
    assert asked == ([] if expected is None else [max(1, expected)])
    assert os.environ.get("OMP_NUM_THREADS") == (given if expected is None else str(max(1, expected)))
