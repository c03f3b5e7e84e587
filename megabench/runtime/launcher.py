"""The environment variables of launchers: torchrun, Slurm, MPI and the operators of Kubernetes. Loads no torch."""

import os
import shlex
import socket
import time
from collections.abc import Sequence

from megabench.errors import UserError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The rank of a process on its host. If none is set, the launcher starts one process on each host or in each pod.
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_RESOLVE_SECONDS = 20.0  # the name of a pod can be resolved a few seconds after the pod starts


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


def local_rank_from_environment() -> int:
    """Return the rank of this process on its host."""
    given = next((os.environ[variable] for variable in _LOCAL_RANKS if variable in os.environ), None)
    if given is None:
        return int(os.environ.get("RANK", "0")) if _is_on_one_host() else 0
    return int(given)


def local_world_size_from_environment() -> int:
    """Return the number of processes on this host."""
    if given := os.environ.get("LOCAL_WORLD_SIZE"):
        return int(given)
    has_local_rank = any(variable in os.environ for variable in _LOCAL_RANKS)
    return int(os.environ.get("WORLD_SIZE", "1")) if has_local_rank or _is_on_one_host() else 1


def _is_on_one_host() -> bool:
    """Return whether the ranks without LOCAL_RANK meet on the loopback interface, so that all are on this host."""
    address = os.environ.get("MASTER_ADDR", "localhost")
    return address == "localhost" or address.startswith("127.") or address.strip("[]") == "::1"


def forget_single_pod() -> None:
    """Remove the variables that an operator of Kubernetes sets in a job of one pod. They count pods, not processes."""
    if _counts_pods() and os.environ["WORLD_SIZE"] == "1":
        for variable in _VARIABLES:
            del os.environ[variable]


def _counts_pods() -> bool:
    return launcher_rank() is not None and not any(variable in os.environ for variable in _LOCAL_RANKS)


def refuse_num_processes(given: int | None) -> None:
    """Raise LauncherError if --nproc is given under a launcher, which alone decides the number of processes."""
    if given:
        raise LauncherError("--nproc is for one machine without torchrun; use torchrun's --nproc-per-node instead")


def check_launcher(num_gpus: int, arguments: Sequence[str] = ()) -> None:
    """Raise LauncherError if the variables of the launcher are invalid, or if each process would train alone.

    `num_gpus` is the number of GPUs that this process sees, and `arguments` are those of the training command. srun and
    mpirun without torchrun start processes that know nothing of each other. The operators of Kubernetes start one
    process in each pod, which would use one of its GPUs.
    """
    for variable in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", *_LOCAL_RANKS, "MASTER_PORT"):
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
    missing = [variable for variable in _VARIABLES if variable not in os.environ]
    if "MASTER_ADDR" in os.environ and missing:
        raise LauncherError(
            f"MASTER_ADDR is set, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not. Start the "
            f"processes with torchrun, which sets all of them, or unset MASTER_ADDR."
        )
    if missing:
        return
    world_size = int(os.environ["WORLD_SIZE"])
    if int(os.environ["RANK"]) >= world_size:
        raise LauncherError(f"RANK={os.environ['RANK']} is not smaller than WORLD_SIZE={world_size}; correct both")
    if _counts_pods() and num_gpus > 1:
        raise LauncherError(
            f"RANK and WORLD_SIZE={world_size} are set without LOCAL_RANK, so they count pods or hosts. This one has "
            f"{num_gpus} GPUs, of which one process would use one. Start one process per GPU in each pod: "
            f"{_torchrun(world_size, num_gpus, arguments)}"
        )
    _check_address()


def _torchrun(num_pods: int, num_gpus: int, arguments: Sequence[str]) -> str:
    place = '--nnodes "$WORLD_SIZE" --node-rank "$RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" '
    program = shlex.join(["-m", "megabench.train", *arguments])
    return f"torchrun {place if num_pods > 1 else ''}--nproc-per-node {num_gpus} {program}"


def _check_address() -> None:
    """Raise LauncherError if MASTER_ADDR cannot be resolved. torch would try for many minutes, and then say less.

    An IPv6 address in brackets loses them, because torch does not resolve it with them.
    """
    address = os.environ["MASTER_ADDR"]
    if address.startswith("[") and address.endswith("]"):
        os.environ["MASTER_ADDR"] = address = address[1:-1]
    deadline = time.monotonic() + _RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:  # a label of more than 63 characters is not valid in IDNA
            if isinstance(error, UnicodeError) or time.monotonic() > deadline:
                raise LauncherError(
                    f"MASTER_ADDR={address} cannot be resolved on {socket.gethostname()} ({error}). Set it to the "
                    f"name or address of the host of rank 0; in Kubernetes, to that of its pod, with a headless Service"
                ) from None
            time.sleep(1.0)


def _check_number(variable: str) -> None:
    if not (given := os.environ.get(variable, "0")).isdecimal():
        raise LauncherError(f"{variable}={given} is not a number; unset it, or let torchrun set it")
