"""Checks of a run before its process group exists."""

from tempfile import TemporaryFile

from megabench.config import ConfigError, ResolvedConfig, RunConfig
from megabench.data import DataError
from megabench.hardware.facts import visible_gpus
from megabench.record import RunRecord
from megabench.runtime import device
from megabench.runtime.device import DeviceKind
from megabench.runtime.messages import disagreement
from megabench.runtime.process import host_name
from megabench.runtime.rendezvous import Rendezvous, restart_count
from megabench.runtime.run_lock import check_free
from megabench.train.resume import Resume


def device_of(given: RunConfig, local_world_size: int) -> DeviceKind:
    """Return the kind of device of the run. Raises DeviceError or ConfigError if it cannot be used."""
    kind = device.choose_device(given.device, local_world_size)
    if kind == "cpu" and given.device == "auto" and (gpus := visible_gpus()):
        raise ConfigError(
            f"device=auto: torch finds no GPU, but the driver finds {len(gpus)}; install a torch version for this "
            f"driver, or use --device cpu to train on the CPU"
        )
    return kind


def make_folders(run: ResolvedConfig) -> None:
    """Create the directories that the run writes to. Raises ConfigError if one is not writable."""
    if run.sketches and run.sketches.is_dir():
        raise ConfigError(f"sketches={run.sketches} is a directory; use the path of a file")
    folders = {"out": run.out, "tensorboard": run.tensorboard, "save": run.save}
    folders["sketches"] = run.sketches.parent if run.sketches else None
    for setting, folder in folders.items():
        if folder:
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


def check_no_other_run(run: ResolvedConfig) -> None:
    """Raise RunLockedError if another run on this host writes into an output directory."""
    for folder in (run.out, run.save):
        if folder:
            check_free(folder)


def check_out(run: ResolvedConfig, resume: Resume) -> None:
    """Raise ConfigError if the output directory contains the record of another run, which would be overwritten."""
    path = run.out / "record.json" if run.out else None
    if path is None or not path.exists() or restart_count() > 0:
        return
    if resume.num_done == 0 or not RunRecord.read(path).saves:  # without checkpoints, no run can resume from that run
        raise ConfigError(
            f"out={run.out} contains the record of another run; use another directory, or delete that one"
        )


def check_same_data(run: ResolvedConfig, sha256: str, rendezvous: Rendezvous) -> None:
    """Raise DataError if this rank and rank 0 read different data, because a file or the Python version differs."""
    theirs = disagreement(rendezvous.store, rendezvous.rank, "data", sha256)
    if theirs is not None:
        raise DataError(
            f"data={run.data} on rank {rendezvous.rank} ({host_name()}) has sha256 {sha256[:12]}, on rank 0 "
            f"{theirs[:12]}; use the same file on every host (for stdlib, the same Python version)"
        )
