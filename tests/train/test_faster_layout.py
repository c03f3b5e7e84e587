"""The prediction of a faster layout neither delays nor fails a run."""

from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from megabench.config import RunConfig
from megabench.cost.job import Stack
from megabench.cost.profile import profile_for
from megabench.data.source import open_source
from megabench.planner.search import plan
from megabench.train import faster_layout as module
from megabench.train import trainer as trainer_module
from megabench.train.faster_layout import FasterLayout
from tests.planner.jobs import cluster, costs, job, megatron

STEP: Any = None  # the callback does not read it


def trainer(notes: list[str], **changes: Any) -> Any:
    settings: dict[str, Any] = {"model": "llama3-8b", "tp": 8, "seq_length": 8192, "global_batch": 32}
    settings |= {"data": "synthetic"} | changes
    given, topology = RunConfig.parse(settings), cluster("p5.48xlarge:1")
    run = given.resolve(8, "cuda")
    return SimpleNamespace(
        given=given,
        requested=run,
        source=open_source(run),
        placement=SimpleNamespace(topology=topology),
        device_name=topology.hosts[0].device,
        note=notes.append,
    )


def started(notes: list[str], **changes: Any) -> FasterLayout:
    callback = FasterLayout()
    callback.on_start(trainer(notes, **changes))
    return callback


def finished(callback: FasterLayout) -> FasterLayout:
    assert callback._thread
    callback._thread.join(timeout=60)
    return callback


def test_the_line_is_printed_once_after_a_step() -> None:
    notes: list[str] = []
    callback = finished(started(notes))
    assert not notes
    for _ in range(3):
        callback.on_step_end(STEP)
    (line,) = notes
    assert line.startswith("megabench plan predicts that ") and " as fast as tp8 mb1" in line


def test_steps_do_not_wait_for_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, may_end = list[str](), Event()
    monkeypatch.setattr(module, "faster_layout", lambda *_: may_end.wait(60) and "another layout")
    callback = started(notes)
    callback.on_step_end(STEP)
    assert not notes
    may_end.set()
    finished(callback).on_step_end(STEP)
    assert notes == ["another layout"]


def test_a_prediction_that_fails_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "faster_layout", fail)
    notes: list[str] = []
    finished(started(notes)).on_step_end(STEP)
    assert not notes


@pytest.mark.parametrize(
    ("rank", "device", "emulate_hosts", "is_supervised", "is_told"),
    [
        (0, "cuda", None, False, True),
        (1, "cuda", None, False, False),
        (0, "cpu", None, False, False),
        (0, "cuda", 2, False, False),
        (0, "cuda", None, True, False),
    ],
)
def test_rank_0_of_a_run_on_gpus_predicts(
    monkeypatch: pytest.MonkeyPatch, rank: int, device: Any, emulate_hosts: int, is_supervised: bool, is_told: bool
) -> None:
    """Trials of a study print nothing: the study compares layouts itself."""
    monkeypatch.setattr(trainer_module, "is_supervised", lambda: is_supervised)
    settings = {"model": "llama3-8b", "tp": 8, "emulate_hosts": emulate_hosts, "data": "synthetic"}
    state: Any = SimpleNamespace(
        run=RunConfig.parse(settings).resolve(8, device),
        resume=SimpleNamespace(num_done=0),
        rendezvous=None,
        rank=rank,
    )
    found = trainer_module.Trainer._built_in_callbacks(state)
    assert any(isinstance(callback, FasterLayout) for callback in found) == is_told


def test_the_layout_is_the_first_one_of_the_plan() -> None:
    """The plan does not keep gathered inputs, even if the run does."""
    topology = cluster("p5.48xlarge:1")
    best = plan(job("llama3-8b", 8192, 32), topology, profile_for(topology.hosts[0].device)).ranked[0]
    for keep_gathered in (False, True):
        callback = finished(started([], keep_gathered=keep_gathered))
        here = replace(job("llama3-8b", 8192, 32), stack=Stack(keeps_gathered=keep_gathered))
        gain = costs(here, topology).estimate(megatron(topology, tp=8)).step_seconds / best.step_seconds
        assert f"{best.candidate.name} trains {gain:.2f} × as fast" in callback._line


def test_runs_that_plans_do_not_describe_get_no_line() -> None:
    assert not finished(started([], kernels="reference"))._line
    assert not finished(started([], tp=1, engine="ddp", powersgd_rank=4))._line
