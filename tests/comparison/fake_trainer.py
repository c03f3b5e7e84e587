"""Stands in for megabench.train: `FAULT` says how it ends, and `FAULT_RANK` on which rank (all others see no fault).

`FAULT_STEPS` keeps the fault to runs of so many steps: probes have fewer.
`SECONDS` tells the step time at each micro-batch, "1:2.5 2:2 4:oom": out of memory at the last.
`BY_RUN` tells the step time of each run of the trial, "0.5 0.51 0.49", and its first again after the last; "oom" is one
that runs out of memory.
`SLEEP` is a time in seconds that passes before anything else, without a message, as while a model loads.
It writes the same files and messages as the trainer, without a model, so that a trial takes a second.
"""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megabench.record import StepSeconds
from tests.study.records import make_record

NUM_STEPS = 4
# what the rank with the fault reports
REPORTS: dict[str, tuple[Any, ...]] = {
    "raise": ("failed", "ValueError: the real cause"),
    "oom": ("oom", "CUDA out of memory"),
    "shm": ("failed", "OSError: [Errno 28] No space left on device: '/dev/shm/torch'"),
    "stall": ("hang", "no progress for 9 s: rank 0 (host) is in recv (x.py:1)", 0),
}


def main() -> int:
    rank = int(os.environ["RANK"])
    fields = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    out = Path(fields["--out"])
    note_pid(out, str(rank), os.getpid())
    time.sleep(float(os.environ.get("SLEEP", "0")))
    seconds = dict(entry.split(":") for entry in os.environ.get("SECONDS", "").split())
    step_seconds = seconds.get(fields.get("--micro-batch", ""), "0.5")
    if by_run := os.environ.get("BY_RUN", "").split():
        number = int(out.name.removeprefix("repeat-")) if out.name.startswith("repeat-") else 0
        step_seconds = by_run[number % len(by_run)]
    has_fault = os.environ.get("FAULT_STEPS", fields["--steps"]) == fields["--steps"]
    fault = step_seconds if step_seconds == "oom" else os.environ.get("FAULT", "") if has_fault else ""
    mine = fault and rank == int(os.environ.get("FAULT_RANK", "0"))
    if fault in ("hang", *REPORTS):
        return with_messages(rank, fault, bool(mine))
    if mine and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mine and fault == "exit":
        print("the words before the end")
        return 3
    if fault == "kill":  # a peer waits for the one that was killed
        time.sleep(600)
    if fault == "grandchild":
        note_pid(out, f"grandchild-{rank}", subprocess.Popen(["sleep", "600"]).pid)
        time.sleep(600)
    if fault == "daemon":
        note_pid(out, f"daemon-{rank}", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    if fault == "full":  # as if the disk were full from here on
        (out.parents[1] / "results.partial").mkdir(exist_ok=True)
    if fault == "freed":
        (out.parents[1] / "results.partial").rmdir()
    if fault == "environment":
        (out / f"environment-{rank}").write_text("\n".join(f"{k}={v}" for k, v in sorted(os.environ.items())))
    if rank == 0 and fault != "no_record":
        losses = [6.0, 5.0, 4.0, float(os.environ.get("LAST_LOSS", "3.0"))]
        took = float(step_seconds)
        steps = StepSeconds(median=took, p10=took, p90=took, all=[took] * (NUM_STEPS - 1))
        measured = {"step_seconds": steps, "grad_norms": [1.0] * NUM_STEPS}
        micro_batch = int(fields.get("--micro-batch", "4"))
        make_record(losses, speed=500 / took, micro_batch=micro_batch, **measured).write(out / "record.json")
    if fault == "linger":
        faulthandler.register(signal.SIGUSR2, file=sys.stderr)
        lost_in_thought()
    return 0


def note_pid(out: Path, name: str, pid: int) -> None:
    unfinished = out / f"{name}.tmp"  # tests read the notes while they are made
    unfinished.write_text(str(pid))
    unfinished.rename(out / f"pid-{name}")


def with_messages(rank: int, fault: str, mine: bool) -> int:
    """The faults that are told over the store."""
    from megabench.runtime import rendezvous
    from megabench.runtime.messages import Progress, report_failure, report_progress

    faulthandler.register(signal.SIGUSR2, file=sys.stderr)
    store = rendezvous.join().store
    report_progress(store, rank, Progress("training", 2 if mine else 3, NUM_STEPS))
    if fault == "hang":
        if mine:
            lost_in_thought()
        waiting_for_peers(Path(sys.argv[sys.argv.index("--out") + 1]) / f"pid-{os.environ['FAULT_RANK']}")
        report_failure(store, rank, "failed", "RuntimeError: Connection closed by peer")
        return 1
    if mine:
        store.wait([f"failure/{peer}" for peer in range(int(os.environ["WORLD_SIZE"])) if peer != rank])
        report_failure(store, rank, *REPORTS[fault])
    else:
        store.wait([f"progress/{os.environ.get('FAULT_RANK', '0')}"])
        report_failure(store, rank, "failed", "RuntimeError: [gloo/pair.cc:1] Connection closed by peer [127.0.0.1]:1")
    return 1


def lost_in_thought() -> None:
    while True:
        time.sleep(0.1)


def waiting_for_peers(noted: Path) -> None:
    """Returns when the process that noted its number is gone, as a collective does."""
    peer = int(noted.read_text())
    with contextlib.suppress(ProcessLookupError):
        while True:  # no Python function below this one, or a stack may end in that
            os.kill(peer, 0)
            time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main())
