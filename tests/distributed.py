"""A pool of worker processes that stays up between tests: half a second a test instead of ten.

`run(function, world_size, *args)` calls a module-level function on every rank of a fresh process group, of gloo or of
NCCL with one GPU a rank, and returns what the ranks returned. A job that fails or hangs ends the workers it used; the
next job starts new ones, as it does where engines that are never freed have left too many threads behind.
"""

import atexit
import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.distributed_preload"])
_MOST_THREADS = 80  # gloo's poll, so that many idle ones keep a machine busy
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer")


class DistributedTestError(AssertionError):
    """A rank failed; the message holds the traceback of the one that failed first on its own account."""


def _reset_globals() -> None:
    """Forgets the process groups that the libraries remember."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    # Its hooks are a circle through C++ that Python's collector does not see. It would keep the threads of its groups.
    for model in [each for each in gc.get_objects() if type(each) is DistributedDataParallel]:
        vars(model).clear()
    parallel_state.destroy_model_parallel()
    RotaryEmbedding.forward.cache_clear()  # a cache of calls, that holds the models
    if "deepspeed" in sys.modules:
        from deepspeed.comm import comm
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.runtime.zero.partition_parameters import Init
        from deepspeed.utils import groups

        comm.cdb = None
        # ZeRO-3 numbers modules and parameters through the life of a process and compares the numbers between ranks,
        # not all of which have run as many jobs
        DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
        Init.param_id = 0
        for name, value in vars(groups).items():
            if name.startswith("_") and name.isupper() and value is not None:
                setattr(groups, name, None)
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # an engine is full of circles, and a gloo group's threads end with its last reference


def _work(rank: int, jobs: Connection) -> None:
    os.setsid()  # whatever a job starts ends with its worker
    import torch
    import torch.distributed as dist

    from megabench.config import ResolvedConfig
    from megabench.runtime import megatron_cpu

    torch.set_num_threads(1)
    megatron_cpu.install()  # its mode belongs to a thread, so not in the preloaded parent
    while (job := jobs.recv()) is not None:
        function, world_size, backend, store_file, args = job
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        try:
            if backend == "nccl":
                for run in [each for each in args if isinstance(each, ResolvedConfig)]:
                    os.environ |= run.spec.environment(run)
                torch.cuda.set_device(rank)
            store = dist.FileStore(store_file, world_size)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240)
            )
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        with contextlib.suppress(BaseException):
            _reset_globals()
        jobs.send((*answer, psutil.Process().num_threads()))


class _Pool:
    def __init__(self) -> None:
        self.workers: list[tuple[Any, Connection]] = []
        self.num_jobs = 0

    @cached_property
    def folder(self) -> str:
        """Made when a job needs it: workers, which are killed, have a pool of their own that has none."""
        return tempfile.mkdtemp(prefix="gloo-pool-")

    def _grow(self, size: int) -> None:
        while len(self.workers) < size:
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_work, args=(len(self.workers), theirs))
            process.start()
            self.workers.append((process, ours))

    def run(
        self, function: Callable[..., Any], world_size: int, backend: str, args: tuple[Any, ...], timeout: float
    ) -> list[Any]:
        self._grow(world_size)
        self.num_jobs += 1
        store_file = os.path.join(self.folder, f"store-{self.num_jobs}")
        for _, jobs in self.workers[:world_size]:
            jobs.send((function, world_size, backend, store_file, args))
        waiting = {jobs: rank for rank, (_, jobs) in enumerate(self.workers[:world_size])}
        answers: list[Any] = [None] * world_size
        most_threads = 0
        failures: list[str] = []
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(waiting, max(deadline - time.monotonic(), 0.0))):
            for jobs in [jobs for jobs in waiting if jobs in ready]:
                rank = waiting.pop(jobs)
                try:
                    ok, answers[rank], num_threads = jobs.recv()
                    most_threads = max(most_threads, num_threads)
                except EOFError:
                    ok, answers[rank] = False, "the process died"
                if not ok:
                    failures.append(f"rank {rank} of {world_size}:\n{answers[rank]}")
                    deadline = min(deadline, time.monotonic() + 5.0)  # the others soon lose it
        if waiting and not failures:
            failures.append(f"ranks {sorted(waiting.values())} of {world_size}: no answer in {timeout:.0f} s")
        if failures or most_threads > _MOST_THREADS:
            self.close()
        if failures:
            own = [text for text in failures if not any(sign in text for sign in _LOST_PEER)]
            raise DistributedTestError((own or failures)[0])
        return answers

    def close(self) -> None:
        for process, _ in self.workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join(5)
        self.workers = []

    def remove(self) -> None:
        """The end of the pool: no process and no file is left."""
        self.close()
        if self.num_jobs:
            shutil.rmtree(self.folder, ignore_errors=True)


_pool = _Pool()
atexit.register(_pool.remove)


def run(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 480.0, backend: str = "gloo"
) -> list[Any]:
    """Calls `function(*args)` on every rank of a group; the results by rank. DistributedTestError if any fails."""
    return _pool.run(function, world_size, backend, args, timeout)


def close() -> None:
    """Ends the workers, and with them what their engines hold of a GPU's memory; the next job starts new ones."""
    _pool.close()
