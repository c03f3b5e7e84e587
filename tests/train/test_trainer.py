"""Threads of a process that keeps an optimizer in host memory, and the end of a rank without a store."""

import os
import sys
from unittest.mock import Mock

import pytest
import torch

from megabench.config import RunConfig
from megabench.runtime import rendezvous
from megabench.train.exits import Exits
from megabench.train.rank_setup import set_threads
from megabench.train.trainer import Trainer
from tests.comparison.compare_process import free_port

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
    set_threads(run)
    assert asked == ([] if expected is None else [max(1, expected)])
    assert os.environ.get("OMP_NUM_THREADS") == (given if expected is None else str(max(1, expected)))


def test_a_rank_whose_launcher_was_killed_waits_for_the_store_only_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_CONNECT_SECONDS", 0.1)
    join = Mock(side_effect=rendezvous.join)
    monkeypatch.setattr(rendezvous, "join", join)
    monkeypatch.setattr("megabench.train.trainer.join", join)
    monkeypatch.setattr("megabench.train.exits.exit_process", sys.exit)
    with pytest.raises(SystemExit) as ended:
        Trainer(RunConfig.parse({"model": "llama-tiny"}), Exits(), None, [])._check()
    assert ended.value.code == 2 and join.call_count == 1
    assert "cannot open the rendezvous store that the launcher named" in capsys.readouterr().err
