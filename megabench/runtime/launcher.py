"""Whether a launcher, such as torchrun, started this process. Loads no torch."""

import os

from megabench.errors import UserError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class LauncherError(UserError):
    """Raised if the environment variables of a launcher are invalid or incomplete."""


def launcher_rank() -> int | None:
    """Return the rank that the launcher gave this process, or None without a launcher.

    Raises LauncherError if the rank is not a number.
    """
    if not all(variable in os.environ for variable in _VARIABLES):
        return None
    _check_number("RANK")
    return int(os.environ["RANK"])


def refuse_num_processes(given: int | None) -> None:
    """Raise LauncherError if --nproc is given under a launcher, which alone decides the number of processes."""
    if given:
        raise LauncherError("--nproc is for one machine without torchrun; use torchrun's --nproc-per-node instead")


def check_launcher() -> None:
    """Raise LauncherError if the variables of torch.distributed are not numbers, or if each process would train alone.

    srun and mpirun without torchrun start processes that know nothing of each other.
    """
    for variable in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        _check_number(variable)
    for variable, needed in (
        ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"),
        ("PMI_SIZE", "WORLD_SIZE"),
        ("WORLD_SIZE", "MASTER_ADDR"),
    ):
        count = os.environ.get(variable, "1")
        if count.isdecimal() and int(count) > 1 and needed not in os.environ:
            raise LauncherError(
                f"{variable}={count} but no {needed}: each process would train a separate model; start torchrun "
                f"once on each host, e.g. srun --ntasks-per-node 1 torchrun --nnodes … --nproc-per-node …"
            )


def _check_number(variable: str) -> None:
    if not (given := os.environ.get(variable, "0")).isdecimal():
        raise LauncherError(f"{variable}={given} is not a number; unset it, or let torchrun set it")
