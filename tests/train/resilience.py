"""A real run under torchrun that tests disturb: started, watched line by line, searched for what it left running."""

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megabench.record import RunRecord

REPOSITORY = Path(__file__).parents[2]
TINY = [
    *("--model", "llama-tiny", "--num-layers", "2", "--seq-length", "64", "--data", "synthetic", "--device", "cpu"),
    *("--log-every", "1"),  # tests wait for the lines
]


@dataclass
class Run:
    """torchrun and the processes under it; `mark` is an environment variable by which they are found again."""

    process: subprocess.Popen[str]
    mark: str
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None

    @classmethod
    def start(
        cls, processes: int, *flags: object, torchrun: tuple[str, ...] = (), srun: bool = False, **variables: str
    ) -> "Run":
        """`srun` starts the ranks without torchrun; rank 0 then hosts the store."""
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *torchrun]
        if srun:
            launcher = ["-m", "tests.chaos.srun", str(processes)]
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        process = subprocess.Popen(
            [sys.executable, *launcher, "launch/pretrain.py", *TINY, *map(str, flags)],
            cwd=REPOSITORY,
            env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "RUN_MARK": mark} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return cls(process, mark)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str) -> None:
        """Reads on to the first line that matches."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"no line matched {pattern!r}:\n{self.output}")

    def read_in_background(self) -> None:
        """Let a thread read the output, so that `output` grows while the run goes on."""
        assert self.process.stdout
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout or ()), daemon=True)
        self.reader.start()

    def finish(self, seconds: float = 240.0) -> int:
        """Its exit status; AssertionError when it does not end in time, and then it is ended."""
        try:
            if self.reader:
                self.process.wait(seconds)
                self.reader.join(10.0)
                return self.process.returncode
            rest, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            for process in [*self.alive(), psutil.Process(self.process.pid)]:
                process.kill()
            raise AssertionError(f"still running after {seconds} s:\n{self.output}") from None
        self.lines.append(rest)
        return self.process.returncode

    def alive(self) -> list[psutil.Process]:
        """The processes of this run below torchrun."""
        return [
            process
            for process in psutil.process_iter()
            if _variable(process, "RUN_MARK") == self.mark and process.pid != self.process.pid
        ]

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank; it must be there."""
        return next(process for process in self.alive() if _variable(process, "RANK") == str(rank))


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name) if process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def losses(out: Path) -> list[float | None]:
    """The losses by step of the run that wrote into `out`, from its first step on."""
    return RunRecord.read(out / "record.json").losses
