"""The training command, which parses flags, trains, and exits with a status.

0: trained; 2: a setting or an input is invalid (one error message, before any process group exists); 1: any other
failure.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Literal, NoReturn

from megabench.config import ConfigError, ResolvedConfig, RunConfig
from megabench.config.auto import resolve_first
from megabench.errors import UserError, error_message
from megabench.hardware.facts import visible_gpus
from megabench.parallel.layout import LayoutError
from megabench.record import Probe, RunRecord
from megabench.runtime.child import die_with_parent
from megabench.runtime.exit import exit_process
from megabench.runtime.launcher import check_launcher
from megabench.runtime.process import host_name, set_up_process
from megabench.runtime.run_lock import check_free
from megabench.train.flags import parse_flags
from megabench.train.launch_commands import launch_commands, small_run_command
from megabench.train.stopping import StoppedError

if TYPE_CHECKING:
    from megabench.runtime.rendezvous import Rendezvous
    from megabench.train.resume import Resume
    from megabench.train.watchdog import Watchdog


# a function that finds the "auto" settings of a configuration by short runs on the ranks of a launch
Find = Callable[[RunConfig, "Rendezvous", Literal["cpu", "cuda"]], tuple[RunConfig, list[Probe]]]


def main(find: Find | None = None, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the training that `arguments` describe (by default those of this process), and exit with its status.

    Settings that are "auto" are refused unless `find` is given.
    """
    # a supervisor sends SIGUSR2 to make a hanging run print its stack
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=False)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # torchrun cannot end its processes if it is killed with SIGKILL
    try:
        set_up_process(sys.argv[1:] if arguments is None else arguments)
        given = parse_flags(arguments)
        if given is not None:
            check_launcher()
    except UserError as error:
        _refuse(str(error))
    if given is not None:
        _run(given, find, sys.argv[1:] if arguments is None else arguments)
    exit_process(0)


def _run(given: RunConfig, find: Find | None, arguments: Sequence[str]) -> None:
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # hide the GPUs, because libraries would use them
    from megabench.data.source import open_source
    from megabench.runtime import rendezvous as rendezvous_module
    from megabench.runtime.device import check_precision, choose_device
    from megabench.runtime.messages import meet
    from megabench.train.callbacks.user_callbacks import load_callbacks
    from megabench.train.memory_check import MemoryCheckError, check_memory
    from megabench.train.resume import find_resume
    from megabench.train.watchdog import Watchdog

    try:
        callbacks = load_callbacks(given.callbacks) if given.callbacks else []
    except ConfigError as error:
        _refuse(str(error))
    try:
        rendezvous = rendezvous_module.join()
    except Exception as error:
        _refuse(f"cannot open the rendezvous store that the launcher named: {error}", has_store=False)
    watchdog = Watchdog(rendezvous, given.stall_seconds, given.steps)
    try:
        device_kind = choose_device(given.device, rendezvous.local_world_size)
        if device_kind == "cpu" and given.device == "auto" and (gpus := visible_gpus()):
            raise ConfigError(
                f"device=auto: torch finds no GPU, but the driver finds {len(gpus)}; install a torch version for this "
                f"driver, or use --device cpu to train on the CPU"
            )
        # these checks do not depend on "auto" settings
        run = (resolve_first if find else RunConfig.resolve)(given, rendezvous.world_size, device_kind)
        check_precision(run.policy, device_kind)
        _make_folders(run)
        if rendezvous.rank == 0:
            _check_free(run)
        source = open_source(run, rendezvous)
        _check_same_data(run, source.sha256, rendezvous)
        watchdog.at("checking the checkpoint", 0)
        if not run.skip_memory_check:
            note = check_memory(run, given, rendezvous.local_rank, rendezvous.local_world_size)
            if note and rendezvous.rank == 0:
                print(note, flush=True)
            # all ranks finish the check before any rank allocates memory
            meet(rendezvous.store, rendezvous.rank, rendezvous.world_size, "memory-check")
        resume = find_resume(run, source, rendezvous)
        _check_out(run, resume)
    except MemoryCheckError as error:
        _refuse(f"{error}{small_run_command()}", rendezvous, kind="oom")
    except LayoutError as error:
        _refuse(f"{error}{launch_commands(given, arguments, rendezvous.world_size)}", rendezvous)
    except (UserError, OSError) as error:
        _refuse(error_message(error), rendezvous)
    if resume.num_done >= run.steps:
        _leave_done(run, resume, watchdog, rendezvous)
        return
    probes = None
    if given.auto_settings and find:
        watchdog.close()  # during the search, the processes supervise each other
        given, probes = _complete(given, find, rendezvous, device_kind)
        run = given.resolve(rendezvous.world_size, device_kind)
        watchdog = Watchdog(rendezvous, given.stall_seconds, given.steps)
    watchdog.at("starting", resume.num_done)
    _set_environment(run)
    _set_threads(run)
    try:
        from megabench.train.comm_preflight import write_nccl_log
        from megabench.train.place_ranks import place_ranks
        from megabench.train.trainer import Trainer

        placement = place_ranks(run, rendezvous)
        if run.device == "cuda":
            write_nccl_log(run.out, rendezvous.rank)
        Trainer(run, given, source, rendezvous, placement, resume, watchdog, probes, callbacks).train()
    except StoppedError as error:
        _stop(str(error), rendezvous)
    except UserError as error:
        _refuse(str(error), rendezvous)
    except KeyboardInterrupt:
        _interrupted(rendezvous)
    except BaseException as error:
        _fail(error, rendezvous)


def _complete(
    given: RunConfig, find: Find, rendezvous: "Rendezvous", device: Literal["cpu", "cuda"]
) -> tuple[RunConfig, list[Probe]]:
    try:
        return find(given, rendezvous, device)
    except StoppedError as error:
        _stop(str(error), rendezvous)
    except UserError as error:
        _refuse(str(error), rendezvous)


def _make_folders(run: ResolvedConfig) -> None:
    """Create the directories that the run writes to. Raises ConfigError if one is not writable."""
    for setting in ("out", "tensorboard", "save"):
        if folder := getattr(run, setting):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"{setting}={folder} cannot be created: {error.strerror}; use a writable path"
                ) from None
            try:
                TemporaryFile(dir=folder).close()
            except OSError as error:
                raise ConfigError(
                    f"{setting}={folder} is not writable: {error.strerror}; use a writable directory"
                ) from None


def _check_free(run: ResolvedConfig) -> None:
    """Raise RunLockedError if another run on this host writes into an output directory."""
    for folder in (run.out, run.save):
        if folder:
            check_free(folder)


def _check_out(run: ResolvedConfig, resume: "Resume") -> None:
    """Raise ConfigError if the output directory contains the record of another run, which would be overwritten."""
    from megabench.runtime.rendezvous import restart_count

    path = run.out / "record.json" if run.out else None
    if path is None or not path.exists() or restart_count() > 0:
        return
    if resume.num_done == 0 or not _has_saved(path):
        raise ConfigError(
            f"out={run.out} contains the record of another run; use another directory, or delete that one"
        )


def _has_saved(record: Path) -> bool:
    """Return whether the run of the record saved checkpoints.

    Without checkpoints, no other run can resume from that run.
    """
    try:
        return bool(RunRecord.read(record).saves)
    except (OSError, ValueError):
        return False


def _check_same_data(run: ResolvedConfig, sha256: str, rendezvous: "Rendezvous") -> None:
    """Raise DataError if this rank and rank 0 read different data, because a file or the Python version differs."""
    from megabench.data import DataError
    from megabench.runtime.messages import disagreement

    theirs = disagreement(rendezvous.store, rendezvous.rank, "data", sha256)
    if theirs is not None:
        raise DataError(
            f"data={run.data} on rank {rendezvous.rank} ({host_name()}) has sha256 {sha256[:12]}, on rank 0 "
            f"{theirs[:12]}; use the same file on every host (for stdlib, the same Python version)"
        )


def _set_environment(run: ResolvedConfig) -> None:
    """Set the engine's environment variables before CUDA starts, unless the user has set them."""
    if run.device == "cuda":
        for name, value in run.spec.environment(run).items():
            os.environ.setdefault(name, value)


def _set_threads(run: ResolvedConfig) -> None:
    """Divide the host's cores among its processes if their optimizers run on the host.

    torchrun gives each process one thread. Libraries that are loaded later read the number of threads from the
    environment.
    """
    uses_host = run.device == "cuda" and run.spec.uses_host(run.options)
    if uses_host and os.environ.get("OMP_NUM_THREADS") in (None, "1"):
        import torch

        from megabench.runtime.rendezvous import share_of_cores

        number = share_of_cores()
        torch.set_num_threads(number)
        os.environ["OMP_NUM_THREADS"] = str(number)  # DeepSpeed's CPUAdam is loaded later


def _refuse(
    sentence: str,
    rendezvous: "Rendezvous | None" = None,
    kind: Literal["invalid", "oom"] = "invalid",
    has_store: bool = True,
) -> NoReturn:
    """Exit with status 2. If all ranks of a launch refuse to start, only one of them prints the error message.

    Without a store, every rank prints the message.
    """
    from megabench.runtime import messages
    from megabench.runtime import rendezvous as rendezvous_module

    is_alone = os.environ.get("WORLD_SIZE", "1") == "1" or "MASTER_ADDR" not in os.environ
    if is_alone and not rendezvous_module.is_supervised():
        rendezvous = None
    elif rendezvous is None and has_store:
        with contextlib.suppress(Exception):  # out of reach
            rendezvous = rendezvous_module.join(timedelta(seconds=20))
    store, rank = (rendezvous.store, rendezvous.rank) if rendezvous else (None, 0)
    messages.explain(store, rank, kind, sentence)
    exit_process(2)


def _leave_done(run: ResolvedConfig, resume: "Resume", watchdog: "Watchdog", rendezvous: "Rendezvous") -> None:
    """Exit with status 0 if no step is left to train. The run was killed after its last save, or was started twice."""
    from megabench.runtime.messages import meet, outlast

    meet(rendezvous.store, rendezvous.rank, rendezvous.world_size, "done")
    watchdog.close()
    outlast(rendezvous.store, rendezvous.rank, rendezvous.world_size, "done")
    if rendezvous.rank == 0 and resume.found:
        print(f"{resume.found.folder} contains step {resume.num_done} of {run.steps}: nothing is left to train")


def _stop(sentence: str, rendezvous: "Rendezvous") -> NoReturn:
    """Exit with status 1. Only one of the ranks prints the error message."""
    from megabench.runtime.messages import explain

    explain(rendezvous.store, rendezvous.rank, "failed", sentence)
    sys.stdout.flush()
    os._exit(1)


def _interrupted(rendezvous: "Rendezvous") -> NoReturn:
    """Exit with status 130, as after Ctrl-C."""
    if rendezvous.rank == 0:
        print("Stopped by Ctrl-C without a save. SIGTERM saves after the current step and then stops.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT)


def _fail(error: BaseException, rendezvous: "Rendezvous") -> NoReturn:
    """Exit with status 1 at once, because an orderly exit would wait for ranks that may never answer."""
    import torch

    from megabench.runtime import messages

    is_oom = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
    kind: messages.FailureKind = "oom" if is_oom else "failed"
    summary = " ".join(f"{type(error).__name__}: {error}".split())
    messages.tell_launcher(summary)
    try:
        messages.report_failure(rendezvous.store, rendezvous.rank, kind, summary[:2000])
    finally:
        traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
