"""One trial under supervision: each supervisor starts the processes of its own ranks and ends them together with all
others. The lead supervisor decides when a trial is over. Over the store, each
supervisor tells the others which of its ranks have exited, and with which status."""

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from torch.distributed import PrefixStore

from megabench.hardware.topology import emulated_host
from megabench.runtime.child import Child, end_all, end_strays, without_launcher
from megabench.runtime.messages import Failure, Progress, read_failure, read_progress
from megabench.runtime.process import host_name
from megabench.runtime.rendezvous import PREFIX_VARIABLE
from megabench.runtime.shared_memory_network import Network, Transport
from megabench.runtime.signed_store import SECRET_VARIABLE, SignedStore, with_prefix
from megabench.supervisor.coordinator import ANSWER_SECONDS, Coordinator
from megabench.supervisor.root_cause import RankEnd

# After the first failure, wait for the reports of other ranks, to separate the cause from its consequences.
SETTLE_SECONDS = 2.5
_STACK_SIGNAL = signal.SIGUSR2
_DUMP_SECONDS = 1.0

_THREAD = re.compile(r"^(?:Current thread 0x|Thread 0x|Stack ).*most recent call first", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$', re.MULTILINE)

Stop = Literal["ended", "failed", "timeout"]


@dataclass(frozen=True)
class Task:
    """The work of one set of processes: the training command with these flags.

    `gb_per_s`, `latency_us` and `transport` are those of the setting `emulate_network`. Without it, `gb_per_s` is None.
    """

    flags: Sequence[str]
    world_size: int
    device: Literal["cpu", "cuda"]
    env: Mapping[str, str]
    logs: Path
    timeout_seconds: float
    num_emulated_hosts: int = 1
    gb_per_s: float | None = None
    latency_us: int = 0
    transport: Transport = "sockets"


class TrialProcesses:
    """The processes of one supervisor for one task.

    `prefix` is the key prefix of the task in the store, and is used only once. `network` connects the task's emulated
    hosts, if its bandwidth is limited.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        task: Task,
        trainer: Sequence[str],
        prefix: str,
        network: Network | None = None,
    ) -> None:
        self._coordinator, self._task, self._prefix = coordinator, task, prefix
        self._command = [*trainer, *task.flags]
        self._network = network
        self._port = str(coordinator.launch.port)
        store = coordinator.launch.store
        self._messages = store.with_secret_of(prefix) if isinstance(store, SignedStore) else PrefixStore(prefix, store)
        self._notes = with_prefix(store, f"{prefix}/supervisors")
        self._children: dict[int, Child] = {}
        self._ended: set[int] = set()
        self._started = time.monotonic()
        self._failed_at: float | None = None

    def run(self, on_progress: Callable[[Progress], None]) -> Stop:
        """Start the ranks of this supervisor. Return after they have exited, or were ended by a common decision.

        Raises StudyStopped if the study cannot continue. No process is left running in any case.
        """
        try:
            self._start()
            stop = self._watch(on_progress)
            self._finish(stop)
        finally:
            end_all(self._children.values())
            for rank in self._children:
                end_strays({PREFIX_VARIABLE: self._prefix, "RANK": str(rank), "MASTER_PORT": self._port})
        return stop

    def ends(self) -> list[RankEnd]:
        """Wait until the processes of all ranks have exited on every host, and return their ends.

        Called by the lead.
        """
        self._coordinator.wait_until(self._have_all_ended, _silence())
        return [RankEnd.from_json(self._notes.get(f"end/{rank}")) for rank in range(self._task.world_size)]

    def _start(self) -> None:
        ranks = [rank for rank in self._coordinator.launch.ranks if rank < self._task.world_size]
        for rank in ranks:
            log = self._task.logs / f"rank-{rank}.log"
            try:
                self._children[rank] = Child(self._command, self._environment(rank), log, self._namespace(rank))
            except (OSError, ValueError) as error:
                order = self._notes.add("failed", 1)
                problem = f"cannot start the process: {error}"
                end = RankEnd(rank, host_name(), code=1, was_ended=False, order=order, last_line=problem)
                self._note_end(end)

    def _namespace(self, rank: int) -> int | None:
        return self._network.namespace(self._host(rank)) if self._network else None

    def _host(self, rank: int) -> int:
        return emulated_host(rank, self._task.world_size, self._task.num_emulated_hosts)

    def _environment(self, rank: int) -> dict[str, str]:
        task = self._task
        environment = {"PYTHONUNBUFFERED": "1"} | without_launcher(os.environ)
        # do not inherit the value, because train/rank_setup.py sets it for each layout
        environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        environment.pop(SECRET_VARIABLE, None)
        if task.device == "cpu":
            environment = {"OMP_NUM_THREADS": "1"} | environment | {"CUDA_VISIBLE_DEVICES": ""}
        placement = self._coordinator.launch.placement_variables(rank, task.world_size)
        store = self._coordinator.launch.store
        secret = {SECRET_VARIABLE: store.secret_of(self._prefix)} if isinstance(store, SignedStore) else {}
        network = self._network.variables(self._host(rank)) if self._network else {}
        return environment | dict(task.env) | network | placement | {PREFIX_VARIABLE: self._prefix} | secret

    def _watch(self, on_progress: Callable[[Progress], None]) -> Stop:
        """Publish which ranks of this supervisor have ended, until the lead decides that the trial is over."""
        while not self._notes.check(["stop"]):
            self._publish_ends()
            if self._coordinator.launch.is_lead:
                if stop := self._decide():
                    self._notes.set("stop", stop)
                elif progress := read_progress(self._messages, 0):
                    on_progress(progress)
            self._coordinator.poll()
        stop_given: Stop = self._notes.get("stop").decode()  # type: ignore[assignment]
        return stop_given

    def _decide(self) -> Stop | None:
        """Decide whether the trial is over.

        Called by the lead. Only counters are read until they change, so the cost of a poll does not depend on the
        number of ranks. Counters are not signed, so only signed messages end a trial.
        """
        now = time.monotonic()
        if self._have_all_ended():
            return "ended"
        if self._failed_at is None and self._has_failed():
            self._failed_at = now
        if self._failed_at is not None and now - self._failed_at > SETTLE_SECONDS:
            return "failed"
        return "timeout" if now - self._started > self._task.timeout_seconds else None

    def _finish(self, stop: Stop) -> None:
        self._publish_ends()
        running = {rank: child for rank, child in self._children.items() if rank not in self._ended}
        places = _ask_where(running) if stop == "timeout" else {}
        failures = {rank: read_failure(self._messages, rank) for rank in running}
        # Supervisors end processes only after every supervisor has read the failures, because peers of an ended process
        # report a lost connection.
        launch = self._coordinator.launch
        self._notes.set(f"looked/{launch.supervisor}", "yes")
        looked = [f"looked/{number}" for number in launch.supervisors if number < self._task.world_size]
        self._coordinator.wait_until(lambda: self._notes.check(looked), _silence())
        end_all(running.values(), self._coordinator.poll)  # keep the heartbeat alive while processes end
        for rank in running:
            self._publish(rank, failures[rank], was_ended=True, place=places.get(rank))

    def _publish_ends(self) -> None:
        for rank, child in self._children.items():
            if rank not in self._ended and child.exit_status() is not None:
                self._publish(rank, read_failure(self._messages, rank), was_ended=False)

    def _publish(self, rank: int, failure: Failure | None, was_ended: bool, place: str | None = None) -> None:
        child = self._children[rank]
        code = child.exit_status()
        progress = read_progress(self._messages, rank)
        end = RankEnd(
            rank=rank,
            host=host_name(),
            code=-9 if code is None else code,  # the process is stuck in the kernel and has not received SIGKILL yet
            was_ended=was_ended,
            order=self._notes.add("failed", 1) if code and not was_ended else None,
            last_line=child.last_line(),
            place=place,
            step=progress.step if progress else 0,
            num_steps=progress.num_steps if progress else 0,
            failure=failure,
        )
        self._note_end(end)

    def _note_end(self, end: RankEnd) -> None:
        self._notes.set(f"end/{end.rank}", end.to_json())
        self._notes.add("ended", 1)
        self._ended.add(end.rank)

    def _count(self, counter: str) -> int:
        return int(self._notes.add(counter, 0))

    def _have_all_ended(self) -> bool:
        size = self._task.world_size
        return self._count("ended") >= size and self._notes.check([f"end/{rank}" for rank in range(size)])

    def _has_failed(self) -> bool:
        if not self._count("failed") and not self._messages.add("failures", 0):
            return False
        ranks = range(self._task.world_size)
        ends = [key for rank in ranks if self._notes.check([key := f"end/{rank}"])]
        return any(RankEnd.from_json(self._notes.get(key)).order for key in ends) or any(
            read_failure(self._messages, rank) for rank in ranks
        )


def _silence() -> str:
    return f"not all supervisors have answered within {ANSWER_SECONDS:.0f} s at the end of a trial"


def _ask_where(children: Mapping[int, Child]) -> dict[int, str]:
    """Make each child print its stack, and return its current function by rank. Ranks without output are omitted.

    Children print the stacks of their threads into their logs with faulthandler on SIGUSR2.
    """
    sizes = {rank: child.log.stat().st_size for rank, child in children.items()}
    for child in children.values():
        child.send(_STACK_SIGNAL)
    time.sleep(_DUMP_SECONDS)
    stands = {}
    for rank, child in children.items():
        with child.log.open("rb") as log:
            log.seek(sizes[rank])
            if place := where_it_stands(log.read().decode(errors="replace")):
                stands[rank] = place
    return stands


def where_it_stands(dump: str) -> str | None:
    """Return the innermost function of the main thread, and the innermost function of megabench; None without a stack.

    "all_reduce (distributed_c10d.py:2830) in train_step (engine.py:61)"
    """
    if not (threads := list(_THREAD.finditer(dump))):
        return None
    # faulthandler prints the newest thread first, so the main thread comes last
    frames = list(_FRAME.finditer(dump, threads[-1].end()))
    if not frames:
        return None
    ours = next((frame for frame in frames if "/megabench/" in frame["file"]), frames[0])
    return _call(frames[0]) if ours is frames[0] else f"{_call(frames[0])} in {_call(ours)}"


def _call(frame: re.Match[str]) -> str:
    return f"{frame['function']} ({PurePath(frame['file']).name}:{frame['line']})"
