"""The trainer owns a run on its rank: it checks, builds, trains and records the run, and ends the process."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.profiler import record_function

from megabench.checkpoint.health import count_non_finite
from megabench.config import ResolvedConfig, RunConfig
from megabench.config.auto import resolve_first
from megabench.data.batch import Batch, micro_batches
from megabench.data.source import TokenSource, open_source
from megabench.engines.base import Engine, StepResult
from megabench.engines.build import build_engine, process_groups
from megabench.errors import UserError, error_message, one_line
from megabench.hardware.gpus import find_gpu
from megabench.metrics import speed_metrics, step_metrics, throughput
from megabench.optim.schedules import learning_rate
from megabench.parallel.layout import LayoutError
from megabench.parallel.placement import Placement
from megabench.programs.program import Follower, Program
from megabench.record import LoadTimes, Probe, Rollback, RunRecord, SaveTimes
from megabench.runtime import device as devices
from megabench.runtime.device import DeviceKind
from megabench.runtime.messages import meet, outlast
from megabench.runtime.process import collect_garbage
from megabench.runtime.rendezvous import Rendezvous, gather_objects, is_supervised, join
from megabench.runtime.run_lock import RunLock
from megabench.specs.registry import ENGINES
from megabench.train import checks
from megabench.train.callbacks import Callback, Step
from megabench.train.callbacks.comm_volume import CommVolume
from megabench.train.callbacks.hardware_monitor import HardwareMonitor
from megabench.train.callbacks.profiler import Profiler
from megabench.train.callbacks.step_timeline import UPDATE
from megabench.train.callbacks.straggler_detector import StragglerDetector
from megabench.train.callbacks.supervisor_progress import SupervisorProgress
from megabench.train.callbacks.tensor_sketches import TensorSketches
from megabench.train.callbacks.user_callbacks import load_callbacks
from megabench.train.checkpointing import Checkpoints, restore
from megabench.train.comm_preflight import Network, nccl_log_path, try_out, write_nccl_log
from megabench.train.exits import Exits
from megabench.train.faster_layout import FasterLayout
from megabench.train.launch_commands import launch_commands, small_run_command
from megabench.train.memory_check import MemoryCheckError, check_memory
from megabench.train.nan_guard import NanGuard
from megabench.train.rank_setup import place_ranks, set_environment, set_threads, settle
from megabench.train.resume import Resume, batch_of_step, find_resume
from megabench.train.run_record import build_record, json_section, write_record
from megabench.train.stopping import SignalledError, StoppedError, StopSignal
from megabench.train.trackers.console import Console
from megabench.train.trackers.tensorboard import TensorBoard
from megabench.train.watchdog import BEFORE_FIRST_STEP, Watchdog

# a function that chooses the "auto" settings of a configuration by timing short runs
Find = Callable[[RunConfig, Rendezvous, DeviceKind], tuple[RunConfig, list[Probe]]]

_STEPS_BETWEEN_LOOKS = 10  # steps between two checks that the output directory still exists


class StepClock:
    """Measures a step from the end of the previous step, so that it includes data loading, logging and callbacks."""

    def __init__(self) -> None:
        self._border = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the previous call, which is the end of the previous step."""
        previous, self._border = self._border, time.perf_counter()
        return self._border - previous

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the `with` block from the step."""
        began = time.perf_counter()
        yield
        self._border += time.perf_counter() - began


class Trainer:
    """Trains a run on this rank and ends the process.

    `given` is the configuration as the user gave it, and `arguments` are the command-line arguments for error messages.
    `find` finds the "auto" settings. Every rank must create a Trainer and call `train`, which does the following:

    1. Check the run, before any process group exists: callbacks, device, settings, output directories, data, memory,
       and the checkpoint to resume from.
    2. Find the "auto" settings by short runs.
    3. Set up the process: environment variables, threads and the placement of the ranks.
    4. Lock the output directories, and initialize the device and the process group.
    5. Test the network, build the engine, and restore the checkpoint.
    6. Train. Each step trains, synchronizes the device, reads the clock, calls the callbacks, checks that the loss is
       finite (and rolls back if it must), polls the save in progress, agrees with the other ranks on stopping, saves
       (outside the step's time), and reports to the watchdog.
    7. Complete the last save and write the record.
    8. Close the callbacks and exit; `Exits` has a method for each way to exit.
    """

    run: ResolvedConfig
    source: TokenSource
    rendezvous: Rendezvous
    watchdog: Watchdog
    resume: Resume
    placement: Placement
    network: Network
    engine: Engine

    def __init__(self, given: RunConfig, exits: Exits, find: Find | None, arguments: Sequence[str]) -> None:
        self.given, self._exits, self._find, self._arguments = given, exits, find, arguments
        self.probes: list[Probe] | None = None
        self.load: LoadTimes | None = None
        self.stopped_by: str | None = None
        self.steps: list[Step] = []
        self._checkpoints: Checkpoints | None = None
        self._stop_signal = StopSignal(exits.signalled)
        self._built_in: list[Callback] = []
        self._users: list[Callback] = []
        self._failed_hooks: list[str] = []

    def train(self) -> NoReturn:
        """Train to the last step, write the record, and end this process with a status."""
        try:
            self._check()
            if self.resume.num_done >= self.run.steps:
                self._leave_done()
            else:
                self._find_auto_settings()
                self._set_up()
                self._start()
                self._build()
                self._train_steps()
                self._finish()
        except MemoryCheckError as error:
            self._exits.refuse(f"{error}{small_run_command()}", kind="oom")
        except LayoutError as error:
            self._exits.refuse(f"{error}{launch_commands(self.given, self._arguments, self.rendezvous.world_size)}")
        except UserError as error:
            self._exits.refuse(str(error))
        except StoppedError as error:
            self._exits.stop(str(error))
        except KeyboardInterrupt:
            self._exits.interrupt()
        except SignalledError as error:
            self._exits.signalled(error.number)
        except BaseException as error:
            self._exits.fail(error)
        self._exits.finish()

    def _check(self) -> None:
        """Check the run before any process group exists. Raises UserError."""
        given = self.given
        self._exits.callbacks = self._users
        load_callbacks(given.callbacks or "", self._users)
        try:
            self.rendezvous = self._exits.rendezvous = join()
        except UserError as error:
            self._exits.refuse(str(error), has_store=False)
        except Exception as error:
            reason = f"cannot open the rendezvous store that the launcher named: {error}"
            self._exits.refuse(reason, has_store=False)
        self.watchdog = self._watch()
        try:
            self._check_settings()
        except OSError as error:
            raise UserError(error_message(error)) from error

    def _watch(self) -> Watchdog:
        return Watchdog(self.rendezvous, self.given.stall_seconds, self.given.steps, self._exits.hang)

    def _check_settings(self) -> None:
        given, rendezvous = self.given, self.rendezvous
        device = checks.device_of(given, rendezvous.local_world_size)
        # these checks do not depend on "auto" settings
        run = (resolve_first if self._find else RunConfig.resolve)(given, rendezvous.world_size, device)
        devices.check_precision(run.policy, device)
        checks.make_folders(run)
        if rendezvous.rank == 0:
            checks.check_no_other_run(run)
        self.source = open_source(run, rendezvous)
        checks.check_same_data(run, self.source.sha256, rendezvous)
        self.watchdog.at("checking the checkpoint", 0)
        if not run.skip_memory_check:
            note = check_memory(run, given, rendezvous.gpu, rendezvous.local_world_size)
            if note and rendezvous.rank == 0:
                print(note, flush=True)
            # all ranks finish the check before any rank allocates memory
            meet(rendezvous.store, rendezvous.rank, rendezvous.world_size, "memory-check")
        self.resume = find_resume(run, self.source, rendezvous)
        checks.check_out(run, self.resume)
        self.run, self.num_before = run, self.resume.num_done

    def _leave_done(self) -> None:
        """Wait for the other ranks and say that no step is left. The run was killed after its last save, or restarted.

        No process group exists.
        """
        store, rank, world_size = self.rendezvous.store, self.rendezvous.rank, self.rendezvous.world_size
        meet(store, rank, world_size, "done")
        self.watchdog.close()
        outlast(store, rank, world_size, "done")
        if rank == 0 and (found := self.resume.found):
            print(f"{found.folder} contains step {self.num_before} of {self.run.steps}: nothing is left to train")

    def _find_auto_settings(self) -> None:
        if self.given.auto_settings and self._find:
            self.watchdog.close()  # during the search, the supervisors detect hangs
            self.given, self.probes = self._find(self.given, self.rendezvous, self.run.device)
            self.run = self.given.resolve(self.rendezvous.world_size, self.run.device)
            self.watchdog = self._watch()

    def _set_up(self) -> None:
        """Set up this process for its rank. The device and the process group do not exist yet."""
        self.watchdog.at("starting", self.num_before)
        self._stop_signal.install()
        self.placement = place_ranks(self.run, self.rendezvous)
        self.requested = self.run
        self.run, note = settle(self.requested, self.placement)
        run = self.run
        if note and self.rendezvous.rank == 0:
            print(note, flush=True)
        set_environment(run)
        set_threads(run)
        if run.device == "cuda":
            write_nccl_log(run.out, self.rendezvous.rank)
        self.rank = self.placement.rank_of(self.rendezvous.rank)
        self.hosts = self.placement.hosts_of_ranks
        self._nan_guard = NanGuard(run, self.resume.training.recent_losses if self.resume.training else ())
        self._built_in = self._built_in_callbacks()
        self._exits.callbacks = [*self._built_in, *self._users]

    def _built_in_callbacks(self) -> list[Callback]:
        run = self.run
        callbacks: list[Callback] = [
            HardwareMonitor(),
            CommVolume(run.layout, self.resume.num_done + 1, run.warmup_steps),
            *([StragglerDetector(run.straggler_every)] if run.straggler_every else []),
            *([Profiler(run.out / "trace" if run.out else None)] if run.profile else []),
            *([TensorSketches(run.sketches)] if run.sketches else []),
            *([SupervisorProgress(self.rendezvous, run.steps)] if is_supervised() else []),
        ]
        if self.rank == 0:
            callbacks.append(Console())
            if run.device == "cuda" and not run.emulate_hosts and not is_supervised():
                callbacks.append(FasterLayout())
            if run.tensorboard:
                callbacks.append(TensorBoard(run.tensorboard))
        return callbacks

    @property
    def callbacks(self) -> Sequence[Callback]:
        """The built-in callbacks of this rank, followed by the user's. None is left when the process ends."""
        return self._exits.callbacks

    @property
    def saves(self) -> list[SaveTimes]:
        """The checkpoints that this run has saved so far, oldest first."""
        return self._checkpoints.times if self._checkpoints else []

    @property
    def num_finished(self) -> int:
        """The number of finished steps, including those of earlier runs."""
        return self.num_before + len(self.steps)

    @property
    def rollbacks(self) -> Sequence[Rollback]:
        """All rollbacks of the run, including those of earlier starts."""
        return self._checkpoints.rollbacks if self._checkpoints else self.resume.rollbacks

    def batches(self, step: int) -> Sequence[Batch]:
        """The micro-batches of this rank in step `step`, counted from 0."""
        number = batch_of_step(self.rollbacks, step)
        return micro_batches(self.source, self.run, self.run.layout.coordinates(self.rank).dp, number)

    def learning_rate(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        return learning_rate(self.run, step)

    def note(self, text: str) -> None:
        """Print `text` for the user, on rank 0 only."""
        if self.rank == 0:
            for callback in self.callbacks:
                callback.on_note(text)

    def _start(self) -> None:
        """Lock the output directories and initialize the device and the process group."""
        self.started = time.perf_counter()
        run = self.run
        folders = [folder for folder in (run.out, run.save) if folder] if self.rank == 0 else []
        self._locks = {folder: RunLock(folder) for folder in folders}
        # The watchdog can name the rank that hangs, so it must act before the collectives time out.
        patience = timedelta(seconds=max(600.0, 2 * BEFORE_FIRST_STEP * run.stall_seconds))
        is_engine = run.engine in ENGINES  # programs choose their own kernels
        self.device = devices.initialize(self.rendezvous, self.rank, run.device, patience, pins_attention=is_engine)
        self.device_name = devices.device_name(self.device)
        gpu = find_gpu(self.device_name) if self.device.type == "cuda" else None
        self.peak_tflops = gpu.peak_tflops(run.precision) if gpu else None
        for callback in self.callbacks:
            callback.on_start(self)
        for text in self.resume.notes:
            self.note(text)

    def _build(self) -> None:
        """Test the network, build the engine, and restore the checkpoint that the run resumes from."""
        run, groups = self.run, process_groups(self.run)
        self.network = try_out(
            run.layout, self.placement.topology, groups, self.rendezvous.store, self.device, nccl_log_path()
        )
        for callback in self.callbacks:
            callback.on_network(self, self.network)
        collect_garbage()  # the modules of the engine have been imported
        self.engine = build_engine(run, self.device)
        if self.resume.found and self.resume.training:
            self.watchdog.at("loading", self.resume.num_done)
            self.load = restore(self.engine, self.resume.found, self.device)
        if not isinstance(self.engine, Program):
            self._tell_ready()
        if run.save:
            self._checkpoints = Checkpoints(
                run,
                self.source,
                self.engine,
                self.rendezvous,
                self.resume,
                self.device,
                self._nan_guard,
                note=self.note,
                on_save=self._saved,
                touch=self.watchdog.touch,
                lock=self._locks.get(run.save),
            )
            self._stop_signal.save_first()

    def _tell_ready(self) -> None:
        for callback in self.callbacks:
            callback.on_ready(self)

    def _saved(self, save: SaveTimes) -> None:
        if self.rank == 0:
            for callback in self.callbacks:
                callback.on_save(save)

    def _train_steps(self) -> None:
        dist.barrier()
        self.watchdog.at("first step", self.num_finished)
        clock = StepClock()
        if isinstance(self.engine, Program):
            self.engine.train(self.source, _Following(self, clock))
            return
        while self.num_finished < self.run.steps and not self.stopped_by:
            index = self.num_finished
            batches, learning_rate = self.batches(index), self.learning_rate(index)
            with self._around_step():
                result = self.engine.train_step(batches, learning_rate, self._before_update)
            self._end_step(result, learning_rate, clock)

    def _around_step(self) -> ExitStack:
        """Return the context of the next step. Callbacks are told when the first timed step begins."""
        if len(self.steps) == self.run.warmup_steps:
            for callback in self.callbacks:
                callback.on_timing_start()
        with ExitStack() as around:
            for callback in self.callbacks:
                around.enter_context(callback.around_step(self.num_finished + 1))
            return around.pop_all()

    def _end_step(self, result: StepResult, learning_rate: float, clock: StepClock) -> None:
        """Measure and check a step that has ended, and save after it if that is due. Collective."""
        run = self.run
        step = self._measured(result, learning_rate, clock)
        for callback in self.callbacks:
            callback.on_step_end(step)
        with clock.paused():
            for callback in self.callbacks:
                callback.between_steps(step)
        self.watchdog.touch()
        _convert_metrics(step)
        for callback in self.callbacks:
            callback.on_metrics(step)
        if run.out and step.number % _STEPS_BETWEEN_LOOKS == 0:
            with clock.paused():
                self._check_out(run.out)
        if problem := self._problem_of(step):
            with clock.paused():
                self._roll_back(step, problem)
        elif self._checkpoints:
            self._checkpoints.poll()
            self.stopped_by = self._stop_signal.agreed(self.device)
            is_last = self.stopped_by is not None or step.number == run.steps
            if due_step := self._checkpoints.due_step(step.number, is_last):
                self.watchdog.at("saving", step.number)
                with clock.paused():
                    self._checkpoints.save(due_step)
        self.watchdog.at("training", self.num_finished)

    def _check_out(self, out: Path) -> None:
        """Raise StoppedError on every rank if rank 0 no longer finds the output directory. Collective."""
        is_gone = torch.tensor([self.rank == 0 and not out.exists()], dtype=torch.int, device=self.device)
        dist.broadcast(is_gone, src=0)
        if is_gone.item():
            raise StoppedError(f"out={out} was deleted or unmounted during the run; start the run again")

    def _measured(self, result: StepResult, learning_rate: float, clock: StepClock) -> Step:
        """Return the step that has ended with `result`."""
        devices.synchronize(self.device)
        seconds, peak_memory_gib = clock.lap(), devices.peak_memory_gib(self.device)
        step = Step(
            number=self.num_finished + 1,
            result=result,
            learning_rate=learning_rate,
            seconds=seconds,
            peak_memory_gib=peak_memory_gib,
            is_timed=len(self.steps) >= self.run.warmup_steps,
            metrics=self._metrics(result, learning_rate, seconds, peak_memory_gib),
        )
        self.steps.append(step)
        return step

    def _before_update(self) -> None:
        for callback in self.callbacks:
            callback.before_update(self.num_finished + 1)

    def _metrics(
        self, result: StepResult, learning_rate: float, seconds: float, peak_memory_gib: float
    ) -> dict[str, float]:
        run = self.run
        achieved = throughput([seconds], run.shape, run.seq_length, run.global_batch, run.world_size)
        assert achieved is not None
        metrics = step_metrics(
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            peak_memory_gib=peak_memory_gib if run.device == "cuda" else None,
            gpu_utilization=None,  # HardwareMonitor adds it
        ) | speed_metrics(
            seconds=seconds,
            tokens_per_second=achieved.tokens_per_second,
            world_size=run.world_size,
            tflops_per_device=achieved.tflops_per_device_causal,
            mfu=achieved.mfu(self.peak_tflops),
        )
        return {tag: value for tag, value in metrics.items() if value is not None}

    def _problem_of(self, step: Step) -> str | None:
        """Return why training cannot continue from `step`, or None. Warn about a tolerated step. Collective."""
        is_wrong, spike = self._nan_guard.is_wrong(step.result), self._nan_guard.spike(step.result)
        if self._checkpoints:
            self._checkpoints.observe(step.number, step.result, is_wrong or spike is not None)
        if not is_wrong:
            return spike
        non_finite = None
        if self.run.can_be_saved:
            non_finite = sum(gather_objects(count_non_finite(self.engine.training_state().shards)), Counter())
        rank_losses = gather_objects(self.engine.rank_loss)
        problem = self._nan_guard.describe(step.number, step.result, rank_losses, self.hosts, non_finite)
        if self._nan_guard.must_stop(step.result, non_finite):
            return problem
        self.note(f"WARNING: {problem}")
        return None

    def _roll_back(self, step: Step, problem: str) -> None:
        """Return to the newest healthy checkpoint, or raise StoppedError on every rank if that is not possible."""
        run, checkpoints = self.run, self._checkpoints
        if not checkpoints:
            raise StoppedError(problem)
        self.watchdog.at("rolling back", step.number)
        checkpoints.close()
        if run.on_nan == "stop":
            raise StoppedError(f"{problem}; {checkpoints.newest_healthy}")
        if len(self.rollbacks) >= run.max_rollbacks:
            raise StoppedError(f"{problem}; max_rollbacks={run.max_rollbacks} is reached; {checkpoints.newest_healthy}")
        found = checkpoints.find_healthy()
        if not found or not found.manifest.training:
            raise StoppedError(f"{problem}; there is no healthy checkpoint to roll back to")
        restored = found.manifest.training.step
        next_batch = batch_of_step(self.rollbacks, step.number - 1) + 1
        rollback = Rollback(step=step.number, restored_step=restored, next_batch=next_batch, problem=problem)
        checkpoints.roll_back(found, rollback)
        del self.steps[max(0, restored - self.num_before) :]
        self.num_before = min(self.num_before, restored)
        for callback in self.callbacks:
            callback.on_rollback(self, rollback)
        self.note(f"ROLLBACK {len(self.rollbacks)} of at most {run.max_rollbacks}: {rollback.sentence}")

    def _finish(self) -> None:
        """Complete the last save, gather the measurements of all ranks, and write the record. Ranks return together.

        Raises StoppedError if the last checkpoint or the record could not be written, or if the run trained nothing.
        """
        for callback in self.callbacks:
            self._ask(callback, callback.on_training_end)
        self.watchdog.at("saving", self.num_finished)
        not_saved = self._checkpoints.close() if self._checkpoints else None
        seconds = [step.seconds for step in self.steps]
        mine: dict[str, Any] = {"seconds": seconds, "peak_memory_gib": devices.peak_memory_gib(self.device)}
        for callback in self.callbacks:
            callback.after_training(self)
        mine |= {
            "sections": {type(callback).__name__: self._ask(callback, callback.local) for callback in self.callbacks}
        }
        mine["failed_hooks"] = self._failed_hooks
        by_rank = gather_objects(mine)
        record = self._record(by_rank) if self.rank == 0 else None
        path, wrong = write_record(record, self._locks.get(self.run.out) if self.run.out else None)
        everyone_hears = [wrong]
        dist.broadcast_object_list(everyone_hears)
        if record:
            for callback in self.callbacks:
                callback.on_end(record, path)
        for lock in self._locks.values():
            lock.release()
        dist.barrier()
        self.watchdog.close()
        dist.destroy_process_group()
        outlast(self.rendezvous.store, self.rendezvous.rank, self.rendezvous.world_size, "training")
        if reasons := [reason for reason in (not_saved, *everyone_hears, self._why_useless()) if reason]:
            raise StoppedError("; ".join(reasons))

    def _why_useless(self) -> str | None:
        """Return the reason why a run that reached its end is not successful, or None."""
        if wrong := self._nan_guard.num_in_a_row:
            return f"the last {wrong} steps had a non-finite loss or gradients, so the run did not train to its end"
        timed = [step for step in self.steps if step.is_timed]
        if timed and all(step.result.skipped for step in timed):
            return "every timed step was skipped, because its gradients were not finite; use bf16, or more steps"
        return None

    def _record(self, by_rank: Sequence[dict[str, Any]]) -> RunRecord:
        """Build the record of the run from the measurements of all ranks."""
        fields: dict[str, Any] = {"extra": {}}
        for callback in self.callbacks:
            name = type(callback).__name__
            parts = [each["sections"].get(name) for each in by_rank]
            if callback in self._built_in:
                fields |= callback.section(parts)
            elif section := self._ask(callback, partial(json_section, callback, parts)):
                fields["extra"][name] = section
        seconds = [max(times) for times in zip(*(each["seconds"] for each in by_rank), strict=True)]
        record = build_record(self, seconds, [each["peak_memory_gib"] for each in by_rank], fields)
        failed = dict.fromkeys([*(text for each in by_rank for text in each["failed_hooks"]), *self._failed_hooks])
        return record.model_copy(update={"warnings": [*record.warnings, *failed]})

    def _ask(self, callback: Callback, hook: Callable[[], Any]) -> Any:
        """Return the result of a hook at the end of the run.

        If a user's callback fails, return None and keep a warning for the record, so that the run does not lose its
        results.
        """
        try:
            return hook()
        except Exception as error:
            if callback in self._built_in:
                raise
            name = type(callback).__name__
            self._failed_hooks.append(f"callback {name} failed at the end of the run: {one_line(error)}")
            return None


class _Following(Follower):
    """Measures the steps of a program, which trains in its own loop."""

    def __init__(self, trainer: Trainer, clock: StepClock) -> None:
        self._trainer, self._clock = trainer, clock
        self._around = ExitStack()
        self._profiler: Profiler | None = None  # while it profiles the step after the last one

    def ready(self) -> None:
        self._trainer._tell_ready()
        self._clock.lap()  # the first step does not contain the set-up of the program

    def begin_step(self) -> None:
        trainer = self._trainer
        if trainer.num_finished < trainer.run.steps:
            self._around = trainer._around_step()
            return
        self._profiler = next(callback for callback in trainer.callbacks if isinstance(callback, Profiler))
        self._around = ExitStack()
        self._around.enter_context(self._profiler.profiling(trainer))

    def before_update(self) -> None:
        if self._profiler:
            self._around.enter_context(record_function(UPDATE))
        else:
            self._trainer._before_update()

    def end_step(self, result: StepResult, learning_rate: float) -> bool:
        self._around.close()
        if not self._profiler:
            self._trainer._end_step(result, learning_rate, self._clock)
        return self._trainer.stopped_by is not None


def _convert_metrics(step: Step) -> None:
    """Convert the metrics that callbacks added, which may be tensors, to numbers."""
    for tag, value in step.metrics.items():
        try:
            step.metrics[tag] = float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"the metric {tag} of step {step.number} is {value!r}, which is not a number; add only numbers"
            ) from None
