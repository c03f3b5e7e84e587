"""The interface of a callback, which observes a run and adds a section to its record."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from megabench.config import ResolvedConfig, RunConfig
from megabench.data.batch import Batch
from megabench.data.source import TokenSource
from megabench.engines.base import Engine, StepResult
from megabench.parallel.placement import Placement
from megabench.record import LoadTimes, Probe, Rollback, RunRecord, SaveTimes
from megabench.runtime.rendezvous import Rendezvous
from megabench.train.comm_preflight import Network
from megabench.train.resume import Resume
from megabench.train.watchdog import Watchdog


@dataclass(frozen=True)
class Step:
    """One finished step, as this rank saw it.

    `number` counts from 1 and includes the steps of earlier runs. `seconds` runs from the end of the previous step to
    the end of this one: it includes data loading, callbacks and logging, but not saving. `is_timed` is false for
    warm-up steps.

    `metrics` holds the values that the log, TensorBoard and the record show, by TensorBoard tag, such as "train/loss".
    Callbacks may add their own in `on_step_end` and `between_steps`.
    """

    number: int
    result: StepResult
    learning_rate: float
    seconds: float
    peak_memory_gib: float
    is_timed: bool
    metrics: dict[str, float] = field(default_factory=dict)


class TrainerState(Protocol):
    """The attributes of the trainer that callbacks may read.

    `network` is available from `on_network` on, `engine` and `load` from `on_ready` on.

    `given` is the configuration as the user gave it, and `requested` its resolved form. In `run`, the engine has also
    decided the settings that depend on the links between ranks. `hosts` is the host of each rank, and `peak_tflops` the
    dense peak of the device in the run's precision if it is known. `steps` are the steps of this start, after the
    `num_before` steps of earlier starts.
    """

    run: ResolvedConfig
    requested: ResolvedConfig
    given: RunConfig
    source: TokenSource
    rendezvous: Rendezvous
    placement: Placement
    resume: Resume
    watchdog: Watchdog
    probes: list[Probe] | None
    rank: int
    hosts: list[str]
    device: torch.device
    device_name: str
    peak_tflops: float | None
    network: Network
    engine: Engine
    load: LoadTimes | None
    num_before: int
    steps: list[Step]
    started: float
    stopped_by: str | None

    @property
    def saves(self) -> list[SaveTimes]:
        """The checkpoints that this run has saved so far, oldest first."""
        ...

    @property
    def num_finished(self) -> int:
        """The number of finished steps, including those of earlier runs."""
        ...

    @property
    def rollbacks(self) -> Sequence[Rollback]:
        """All rollbacks of the run, including those of earlier starts."""
        ...

    def batches(self, step: int) -> Sequence[Batch]:
        """The micro-batches of this rank in step `step`, counted from 0."""
        ...

    def learning_rate(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        ...

    def note(self, text: str) -> None:
        """Print `text` for the user, on rank 0 only."""
        ...


class Callback:
    """Observes a run; every hook does nothing by default. Each rank has its own instance.

    Hooks are called in this order: `on_start`, `on_network`, `on_ready`, then `around_step`, `before_update`,
    `on_step_end`, `between_steps` and `on_metrics` for each step (`on_timing_start` before the first timed step,
    `on_save` when a checkpoint is complete, `on_rollback` after a rollback), `on_training_end`, `after_training`,
    `local`, `section`, `on_end`. Before the process exits, `on_error` is called if the run failed, and then `close`.

    Collective operations are allowed in `on_start`, `on_network`, `on_ready`, `before_update`, `between_steps`,
    `on_rollback` and `after_training`, if every rank calls them. Collective operations are forbidden in the other
    hooks, which may run on some ranks only.
    """

    def on_start(self, trainer: TrainerState) -> None:
        """Called when the devices are initialized and `trainer.engine` does not exist yet."""

    def on_network(self, trainer: TrainerState, network: Network) -> None:
        """Called after every process group has communicated once."""

    def on_ready(self, trainer: TrainerState) -> None:
        """Called when the engine holds its initial or resumed state."""

    def around_step(self, step: int) -> AbstractContextManager[Any]:
        """Return a context manager in which step `step`, counted from 1, is trained."""
        return nullcontext()

    def before_update(self, step: int) -> None:
        """Called on all ranks between `accumulate` and `update` of step `step`, within its measured time.

        `engine.full_tensors("gradients")` returns gradients only here.
        """

    def on_timing_start(self) -> None:
        """Called after warm-up, before the first timed step."""

    def on_step_end(self, step: Step) -> None:
        """Called when a step has ended on this rank."""

    def between_steps(self, step: Step) -> None:
        """Called on all ranks after each step, outside its measured time."""

    def on_metrics(self, step: Step) -> None:
        """Called when `step.metrics` is complete, which is the time to log them."""

    def on_rollback(self, trainer: TrainerState, rollback: Rollback) -> None:
        """Called on all ranks when the run has returned to an earlier step. `trainer.steps` ends with that step."""

    def on_save(self, save: SaveTimes) -> None:
        """A checkpoint is complete. Called on rank 0 only."""

    def on_note(self, text: str) -> None:
        """Called with a message for the user. Called on rank 0 only."""

    def on_training_end(self) -> None:
        """Called when the last step has ended."""

    def after_training(self, trainer: TrainerState) -> None:
        """Called after the last checkpoint is complete and the peak memory has been read."""

    def local(self) -> object:
        """Return this rank's part of the record section. It must be picklable."""
        return None

    def section(self, by_rank: Sequence[Any]) -> Mapping[str, Any]:
        """Combine the parts of all ranks into a section of the record. Called on rank 0 only.

        A built-in callback returns fields of `RunRecord`. A user's callback returns JSON values, which the record
        stores as `extra[NAME]`, where NAME is the name of the class.
        """
        return {}

    def on_end(self, record: RunRecord, path: Path | None) -> None:
        """Called when the record is complete, and written to `path` if the run has an output directory.

        Called on rank 0 only.
        """

    def on_error(self, reason: str) -> None:
        """Called with the reason when the run fails or is interrupted, on every rank that can still call it.

        `on_error` and `close` are called before every exit that the process makes itself, also before `on_start`, and
        in another thread if a signal arrives or the main thread hangs. All callbacks together have 10 seconds.
        """

    def close(self) -> None:
        """Release resources. Called last, after success and failure; see `on_error`."""
