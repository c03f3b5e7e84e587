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

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from megabench.data.batch import Batch
from megabench.engines.base import Engine
from megabench.parallel.layout import Layout, differing_axes
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
        if trainer.stopped_by:
            return
        trainer.watchdog.at("profiling", trainer.num_finished)
        last, folder = trainer.run.steps - 1, self._folder
        batches, learning_rate = trainer.batches(last), trainer.learning_rate(last)
        self._profiled = profile_step(
            trainer.engine, batches, learning_rate, trainer.run.layout, trainer.device, folder
        )

    def local(self) -> tuple[float, Split] | None:
        return self._profiled

    def section(self, by_rank: Sequence[tuple[float, Split] | None]) -> Mapping[str, Any]:
        profiled = [one for one in by_rank if one]
        return {"profile": _mean(profiled) if profiled else None}


def profile_step(
    engine: Engine,
    batches: Sequence[Batch],
    learning_rate: float,
    layout: Layout,
    device: torch.device,
    folder: Path | None,
) -> tuple[float, Split]:
    """Train a step under the profiler; return its seconds on this rank and their split into parts. Collective."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as traced:
        dist.barrier()  # starting the profiler takes a different time on each rank
        synchronize(device)
        with _timed() as took, record_function(STEP):
            engine.accumulate(batches)
            with record_function(UPDATE):
                engine.update(learning_rate)
            synchronize(device)
    with tempfile.TemporaryDirectory() as temporary:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        path = (folder or Path(temporary)) / f"rank-{dist.get_rank()}.json.gz"
        traced.export_chrome_trace(str(path))
        with gzip.open(path) as file:
            return took[0], split(json.load(file), lambda ranks: differing_axes(layout, ranks))


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
