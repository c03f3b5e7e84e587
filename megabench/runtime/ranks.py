"""Run a command on several processes, started by a launcher or by the command itself."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megabench.errors import UserError
from megabench.runtime import rendezvous
from megabench.runtime.child import Child, end_all, without_launcher
from megabench.runtime.device import DeviceKind, initialize
from megabench.runtime.process import collect_garbage, skip_shutdown

_PATIENCE = timedelta(hours=12)  # the other ranks wait while rank 0 reads large files


class RanksError(UserError):
    """Raised if the number of processes is wrong, or if a process ended early."""


@contextmanager
def joined(world_size: int, device: DeviceKind = "cpu") -> Iterator[int]:
    """Create a process group of `world_size` processes and yield the rank of this one.

    Without a launcher, this process is rank 0 and starts the same command again for each other rank. The started
    processes end when rank 0 ends. If one of them fails, the error shows the last line that it printed. Raises
    RanksError if a launcher started another number of processes.
    """
    collect_garbage()
    launched = rendezvous.world_size_from_environment()
    skip_shutdown()
    if "RANK" in os.environ:
        if launched != world_size:
            raise RanksError(
                f"this command needs {world_size} processes, but {launched} were started; "
                f"use torchrun --nproc-per-node {world_size}, or start the command without a launcher"
            )
        place = rendezvous.join()
        initialize(place, place.rank, device, _PATIENCE)
        try:
            yield place.rank
        finally:
            dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory(prefix="megabench-") as logs:
        store = rendezvous.open_store()
        children = [_start(rank, world_size, store.port, Path(logs)) for rank in range(1, world_size)]
        try:
            os.environ |= _place(0, world_size, store.port)
            place = rendezvous.join()
            initialize(place, place.rank, device, _PATIENCE)
            yield 0
            dist.destroy_process_group()
        except UserError:
            raise  # every rank raises rank 0's error
        except Exception as error:
            lost = next((child for child in children if child.exit_status()), None)
            if lost is None:
                raise
            raise RanksError(f"a child process ended: {lost.last_line()}") from error
        finally:
            end_all(children)
            for name in _place(0, world_size, store.port):
                os.environ.pop(name, None)


def largest_of_all(value: int) -> int:
    """Return the maximum of `value` over all ranks. All ranks must call the function."""
    largest = torch.tensor(value)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def _start(rank: int, world_size: int, port: int, logs: Path) -> Child:
    environment = without_launcher(os.environ) | _place(rank, world_size, port)
    return Child([sys.executable, *sys.orig_argv[1:]], environment, logs / f"rank-{rank}.log")


def _place(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables that a launcher whose agent hosts the store would set for `rank`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
