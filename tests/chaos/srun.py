"""`python srun.py N SCRIPT ARGUMENTS…` starts N ranks as `srun --kill-on-bad-exit` does: rank 0 hosts the store."""

import os
import signal
import subprocess
import sys
import time

from tests.comparison.compare_process import free_port


def main(size: int, command: list[str]) -> int:
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port())
    ranks = [
        subprocess.Popen([sys.executable, *command], env={**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(size)
    ]

    def forward(number: int, _: object) -> None:
        for rank in ranks:
            rank.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):  # srun forwards signals to all tasks
        signal.signal(number, forward)
    while all(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
    deadline = time.monotonic() + (10.0 if any(rank.returncode for rank in ranks) else 60.0)
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
        if any(rank.returncode for rank in ranks):
            deadline = min(deadline, time.monotonic() + 10.0)
    for rank in ranks:
        rank.kill()
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
