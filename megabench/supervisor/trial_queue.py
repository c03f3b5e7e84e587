"""Run the trials of a launch one after the other, each in fresh processes on all ranks.

The lead supervisor starts trials, and all supervisors take part.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megabench.config import RunConfig
from megabench.record import EmulatedNetworkUsed, RunFailure, RunRecord
from megabench.runtime.messages import Progress
from megabench.runtime.shared_memory_network import create_network
from megabench.study.study import Trial
from megabench.supervisor.coordinator import Coordinator
from megabench.supervisor.root_cause import RankEnd, Verdict, classify_failure
from megabench.supervisor.trial_process import Stop, Task, TrialProcesses

TRAINER = (sys.executable, "-m", "megabench.train")


def task_of(trial: Trial, config: RunConfig, logs: Path) -> Task:
    """Return the task that runs `config` with the resources of `trial`, and writes its record and logs into `logs`."""
    device, network = trial.resolved.device, trial.resolved.emulate_network
    return Task(
        flags=config.model_copy(update={"device": device, "out": logs}).flags(),
        world_size=trial.world_size,
        device=device,
        env=trial.env,
        logs=logs,
        timeout_seconds=trial.timeout_seconds,
        num_emulated_hosts=trial.resolved.emulate_hosts or 1,
        gb_per_s=network.gb_per_s if network else None,
        latency_us=network.latency_us if network else 0,
        transport=network.transport if network else "sockets",
    )


@dataclass(frozen=True)
class Result:
    """The result of a task: the record of its rank 0, or the reason why there is none.

    `network` is the network between emulated hosts, if its bandwidth was limited.
    """

    record: RunRecord | None
    verdict: Verdict
    num_hosts: int
    network: EmulatedNetworkUsed | None


class TrialQueue:
    """Runs tasks, one after the other, on all ranks of a launch.

    `trainer` is the training command, which receives the flags of a task.
    """

    def __init__(self, coordinator: Coordinator, trainer: Sequence[str]) -> None:
        self._coordinator, self._trainer = coordinator, tuple(trainer)
        self._count = 0

    def run(self, task: Task, on_progress: Callable[[Progress], None]) -> Result:
        """Run a task, and wait for its end on every host. Called by the lead."""
        self._coordinator.announce(f"task/{self._count}", {"task": asdict(task) | {"logs": str(task.logs)}})
        stop, ends, network = self._run_processes(task, on_progress)
        num_hosts = len({end.host for end in ends})
        verdict = classify_failure(ends, stop == "timeout", task.timeout_seconds)
        path, record = task.logs / "record.json", None
        if verdict.status == "ok" and not path.exists():
            verdict = _wrong_record("rank 0 ended with exit status 0 but wrote no record.json")
        # the record is written last, so the measurement is complete
        elif verdict.status in ("ok", "timeout") and path.exists():
            try:
                record = RunRecord.read(path)
            except ValueError as problem:
                verdict = _wrong_record(f"rank 0 wrote an invalid record.json: {str(problem).splitlines()[0]}")
        if record and verdict.status == "timeout":
            late = f"its processes had not ended when all was measured: {verdict.error}"
            record = record.model_copy(update={"warnings": [*record.warnings, late]})
            verdict = Verdict("ok")
        return Result(record, verdict, num_hosts, network)

    def _run_processes(
        self, task: Task, on_progress: Callable[[Progress], None]
    ) -> tuple[Stop, list[RankEnd], EmulatedNetworkUsed | None]:
        """Run the processes of a task. Return how and where they ended, and the network between emulated hosts.

        A network with limited bandwidth exists only during the task, and is measured before and after it.
        """
        if task.gb_per_s is None:
            run = TrialProcesses(self._coordinator, task, self._trainer, self._prefix())
            return run.run(on_progress), run.ends(), None
        port = self._coordinator.launch.port
        limits = (task.gb_per_s, task.latency_us)
        with create_network(task.transport, task.num_emulated_hosts, *limits, port) as network:
            before = network.measure()
            run = TrialProcesses(self._coordinator, task, self._trainer, self._prefix(), network)
            stop, ends = run.run(on_progress), run.ends()
            try:
                after = network.measure()
            except OSError:  # the run has ended well, and its result stays
                after = []
        used = EmulatedNetworkUsed(
            gb_per_s=task.gb_per_s, latency_us=task.latency_us, transport=task.transport, before=before, after=after
        )
        return stop, ends, used

    def end(self, verdict: Any) -> None:
        """Announce that no task is left, and the verdict. Called by the lead."""
        self._coordinator.announce(f"task/{self._count}", {"verdict": verdict})

    def follow(self) -> Any:
        """Take part in the trials until the lead supervisor ends them, and return its verdict."""
        while "verdict" not in (order := self._coordinator.announced(f"task/{self._count}")):
            task = Task(**order["task"] | {"logs": Path(order["task"]["logs"])})
            TrialProcesses(self._coordinator, task, self._trainer, self._prefix()).run(lambda progress: None)
        return order["verdict"]

    def _prefix(self) -> str:
        """Return the key prefix of the next task in the store, which is used only once."""
        self._count += 1
        return f"{self._coordinator.launch.root}/task/{self._count}"


def _wrong_record(error: str) -> Verdict:
    return Verdict("failed", error, RunFailure(kind="error", rank=0))
