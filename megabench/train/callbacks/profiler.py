"""Profile one step with torch.profiler: a Chrome trace of every rank, and the time by part of the step."""

import contextlib
import gzip
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from megabench.parallel.layout import differing_axes
from megabench.programs.program import Program
from megabench.record import Communication, StepProfile
from megabench.runtime.device import synchronize
from megabench.train.callbacks.callback import Callback, TrainerState
from megabench.train.callbacks.step_timeline import STEP, UPDATE, Split, split


class Profiler(Callback):
    """Trains one additional step under torch.profiler after the last step, and records the time of each part.

    Traces are written to `folder` as rank-N.json.gz, for chrome://tracing or Perfetto. Without a folder, the traces are
    deleted.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._profiled: tuple[float, Split] | None = None

    def after_training(self, trainer: TrainerState) -> None:
        if trainer.stopped_by or isinstance(trainer.engine, Program):  # programs train the step in their own loop
            return
        last = trainer.run.steps - 1
        batches, learning_rate = trainer.batches(last), trainer.learning_rate(last)
        with self.profiling(trainer):
            trainer.engine.accumulate(batches)
            with record_function(UPDATE):
                trainer.engine.update(learning_rate)

    @contextlib.contextmanager
    def profiling(self, trainer: TrainerState) -> Iterator[None]:
        """Profile a step, which the block trains, with its update in `record_function(UPDATE)`. Collective."""
        trainer.watchdog.at("profiling", trainer.num_finished)
        device, layout = trainer.device, trainer.run.layout
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        with profile(activities=activities) as traced:
            dist.barrier()  # starting the profiler takes a different time on each rank
            synchronize(device)
            with _timed() as took, record_function(STEP):
                yield
                synchronize(device)
        with tempfile.TemporaryDirectory() as temporary:
            if self._folder:
                self._folder.mkdir(parents=True, exist_ok=True)
            path = (self._folder or Path(temporary)) / f"rank-{dist.get_rank()}.json.gz"
            traced.export_chrome_trace(str(path))
            with gzip.open(path) as file:
                self._profiled = took[0], split(json.load(file), lambda ranks: differing_axes(layout, ranks))

    def local(self) -> tuple[float, Split] | None:
        return self._profiled

    def section(self, by_rank: Sequence[tuple[float, Split] | None]) -> Mapping[str, Any]:
        profiled = [one for one in by_rank if one]
        return {"profile": _mean(profiled) if profiled else None}


@contextlib.contextmanager
def _timed() -> Iterator[list[float]]:
    """Yield a list to which the duration of the block in seconds is appended."""
    took: list[float] = []
    started = time.perf_counter()
    yield took
    took.append(time.perf_counter() - started)


def _mean(everyone: Sequence[tuple[float, Split]]) -> StepProfile:
    parts: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    exposed: Counter[str] = Counter()
    for _, one in everyone:
        parts.update(one.parts)
        seconds.update(one.communication)
        exposed.update(one.exposed)
    count = len(everyone)
    return StepProfile(
        step_seconds=sum(took for took, _ in everyone) / count,
        seconds={part: value / count for part, value in parts.items()},
        communication={
            axes: Communication(seconds=value / count, exposed_seconds=exposed[axes] / count)
            for axes, value in seconds.items()
        },
    )
