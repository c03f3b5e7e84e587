"""The rendezvous store, which ranks use before any process group exists.

Under torchrun the environment names the store. Under `megabench compare`, each trial has its own key prefix in the
supervisor's store (MEGABENCH_STORE_PREFIX), so that it cannot read the keys of another trial.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from megabench.runtime.launcher import local_rank_from_environment, local_world_size_from_environment
from megabench.runtime.process import host_name
from megabench.runtime.signed_store import SignedStore, agree_on_key, secret_from_environment

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 30.0  # time limit for connecting to a store that another process hosts
PREFIX_VARIABLE = "MEGABENCH_STORE_PREFIX"


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous store, and the rank and host of this process in the launch.

    `base` is the store for torch's process groups if `store` is signed.
    """

    store: Store
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    base: Store | None = None

    @property
    def gpu(self) -> int:
        """The number of this process's GPU among those that it sees. Slurm may show each process only its own."""
        return 0 if torch.cuda.device_count() == 1 else self.local_rank


def is_supervised() -> bool:
    """Return whether a supervisor started this process."""
    return PREFIX_VARIABLE in os.environ


def world_size_from_environment() -> int:
    """Return the launcher's world size; 1 without a launcher. Needs no store."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def share_of_cores() -> int:
    """Return the number of cores that this process may use."""
    return max(1, (os.cpu_count() or 1) // local_world_size_from_environment())


def rank_from_environment() -> int:
    """Return the launcher's rank; 0 without a launcher. Needs no store."""
    return int(os.environ.get("RANK", "0"))


def reconnect(store: Store) -> Store:
    """Open another connection to the same store, because a waiting call blocks all other calls of its connection."""
    connection: Store = store.clone()  # type: ignore[attr-defined, unused-ignore]
    return connection


def restart_count() -> int:
    """Return how many times the launcher has restarted this run (torchrun after a failure, Slurm after a requeue)."""
    return max(int(os.environ.get(name, "0")) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def launch_identity() -> str:
    """Return an identifier of this launch, which stays the same when the launcher restarts the run. For rank 0."""
    if job := os.environ.get("SLURM_JOB_ID"):
        return f"slurm {job}.{os.environ.get('SLURM_STEP_ID', '')}"
    if (run := os.environ.get("TORCHELASTIC_RUN_ID", "none")) != "none":
        return f"torchrun {run}"
    parent = psutil.Process(os.getppid())
    return f"process {parent.pid} of {host_name()} since {parent.create_time():.0f}"


def open_store(port: int = 0, timeout: timedelta = timedelta(minutes=10)) -> TCPStore:
    """Host a store for the processes of this machine. Port 0 chooses a free port.

    The store listens on the loopback interface only, because anyone who can reach a store can change its keys.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(1024)
        port, descriptor = listener.getsockname()[1], os.dup(listener.fileno())
    return TCPStore(
        LOOPBACK,
        port,
        world_size=None,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=descriptor,
    )


def _is_loopback(address: str) -> bool:
    try:
        return socket.gethostbyname(address).startswith("127.")
    except OSError:
        return False


def _check_reachable(address: str, port: int) -> None:
    """Raise OSError if nothing listens at the address of a store that exists already, because its host was killed.

    TCPStore itself would try to connect for many minutes.
    """
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


@contextmanager
def _told_after(seconds: float, message: str) -> Iterator[None]:
    """Print `message` if the body takes more than `seconds`."""
    timer = threading.Timer(seconds, print, [message], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def join(timeout: timedelta = timedelta(minutes=10), secret: str | None = None) -> Rendezvous:
    """Open the store that the launcher named. A process without a launcher hosts its own store, with world size 1.

    With a secret, from the argument or the environment, the messages of several processes are signed.
    """
    secret = secret or secret_from_environment()
    environment = os.environ
    rank, world_size = rank_from_environment(), world_size_from_environment()
    if "MASTER_ADDR" not in environment:
        return Rendezvous(open_store(timeout=timeout), 0, 1, 0, 1)
    # torchrun's agent hosts the store; with other launchers, rank 0 hosts it
    hosted = is_supervised() or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    is_host = not hosted and rank == 0
    if is_host and local_world_size_from_environment() == world_size and _is_loopback(address):
        store: Store = open_store(port, timeout)
    else:
        if hosted:
            _check_reachable(address, port)
        with _told_after(20.0, f"rank {rank} waits for rank 0 at {address}:{port} (MASTER_ADDR, MASTER_PORT)"):
            store = TCPStore(address, port, world_size=None, is_master=is_host, timeout=timeout)
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = environment.get(PREFIX_VARIABLE, f"megabench/{attempt}")
    messages: Store
    base = messages = PrefixStore(prefix, store)
    if secret and is_supervised():  # the supervisor passed a key of its own for this trial
        messages = SignedStore(store, secret.encode(), prefix)
    elif secret and world_size > 1:
        messages = SignedStore(store, agree_on_key(base, secret, rank, world_size, timeout), prefix)
    return Rendezvous(
        store=messages,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank_from_environment(),
        local_world_size=local_world_size_from_environment(),
        base=base,
    )


def gather_objects(mine: T) -> list[T]:
    """Gather one object from each rank and return them in rank order. Collective over the default process group."""
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
