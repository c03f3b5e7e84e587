"""A rank that is slow at local work is named."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megabench.doctor import examine
from megabench.record import RunRecord, Straggler
from megabench.train.callbacks.straggler_detector import StragglerDetector
from tests.study.records import make_record
from tests.train.resilience import Run

FAULTS = str(Path(__file__).parents[2] / "faults")


def detector() -> tuple[StragglerDetector, list[str]]:
    notes: list[str] = []
    found: Any = StragglerDetector(10)
    hosts = ["a", "a", "b", "b"]
    found._trainer = SimpleNamespace(hosts=hosts, device=torch.device("cuda"), note=notes.append)
    found._gpus = [0, 1, 0, 1]
    return found, notes


def test_a_rank_is_named_once_after_two_slow_checks() -> None:
    found, notes = detector()
    for step, slow in ((10, 2.0), (20, 1.2), (30, 1.5), (40, 1.5), (50, 1.5)):
        found._judge(step, [1.0, 1.1, 0.9, slow])
    (straggler,) = found.section([])["stragglers"]
    assert (straggler.rank, straggler.place, straggler.step) == (3, "rank 3 on b (GPU 1)", 40)
    assert straggler.slowdown == pytest.approx(1.5 / 1.05)
    (note,) = notes
    assert "straggler at step 40: rank 3 on b (GPU 1) takes 1.43 times" in note


def test_equal_ranks_are_not_named() -> None:
    found, notes = detector()
    for step in (10, 20, 30):
        found._judge(step, [1.0, 1.1, 0.9, 1.2])
    assert found.section([]) == {"stragglers": []} and not notes


def test_the_doctor_names_it() -> None:
    record = make_record([3.0, 2.0])
    record.stragglers = [Straggler(rank=3, host="b", gpu=1, step=40, slowdown=1.3)]
    (finding,) = [found for found in examine([record], record.trial) if "slow rank" in found.what]
    assert "rank 3 on b (GPU 1) takes 1.30 times" in finding.evidence


@pytest.mark.e2e
def test_a_slowed_rank_is_found(tmp_path: Path) -> None:
    flags = ("--engine", "ddp", "--steps", 12, "--straggler-every", 3, "--out", tmp_path)
    run = Run.start(3, *flags, "--global-batch", 12, PYTHONPATH=FAULTS, FAULT="slow", FAULT_RANK="1")
    assert run.finish() == 0, run.output
    record = RunRecord.read(tmp_path / "record.json")
    # another rank may be slow too, if other programs use its cores
    assert {found.rank: found.slowdown for found in record.stragglers}[1] > 1.25
    assert len(re.findall(r"WARNING: straggler at step \d+: rank 1 ", run.output)) == 1
