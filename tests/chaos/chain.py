"""One chain: the same training command, disturbed, resumed under another layout, and disturbed again, up to its end."""

import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megabench.checkpoint.directory import folder_of, looks_good, steps_in
from tests.chaos.loss_log import Key, read_losses
from tests.train.resilience import REPOSITORY, Run

STEPS, KEEP = 24, 3
BAD_BATCH = 9
STALL_SECONDS = 12  # a busy machine pauses a rank for seconds
END_SECONDS = 240.0
TOLERANCE = 1e-5

Layout = tuple[int, str]  # number of processes, flags

FAMILIES: dict[str, tuple[Layout, ...]] = {
    "megatron": (
        (1, ""),
        (2, "--tp 2"),
        (2, "--pp 2"),
        (2, "--pp 2 --vp 2"),
        (2, "--cp 2"),
        (2, ""),
        (4, "--tp 2 --pp 2"),
        (4, "--tp 2"),
        (4, "--pp 2 --micro-batch 2"),
    ),
    "deepspeed": (
        (1, "--zero-stage 1"),
        (2, "--zero-stage 1"),
        (2, "--zero-stage 2"),
        (2, "--zero-stage 3"),
        (4, "--zero-stage 3"),
    ),
    "fsdp": ((1, ""), (2, ""), (4, "--shard-size 2")),
    "ddp": ((1, ""), (2, "")),
}

SIGNALS = (*[signal.SIGKILL] * 5, *[signal.SIGTERM] * 2, signal.SIGSTOP)
PHASES = ("start", "step", "save", "load", "rollback")
_PATTERNS = {"step": r"^step +\d+/", "load": r"^resumed from", "rollback": r"^ROLLBACK|^checkpoints: .*unhealthy$"}


@dataclass
class Report:
    """What a suite has found so far. `problems` must stay empty."""

    told: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    layouts: set[str] = field(default_factory=set)
    seconds_to_end: list[float] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)
    worst_difference: float = 0.0

    def tell(self, line: str) -> None:
        self.told.append(line)
        print(f"{len(self.told)}: {line}", flush=True)

    def check(self, is_right: object, problem: str) -> None:
        if not is_right:
            self.problems.append(problem)
            print(f"WRONG: {problem}", flush=True)


class Chain:
    """Runs in `place` of one engine family, with or without a batch that poisons the weights."""

    def __init__(self, place: Path, family: str, is_poisoned: bool, dice: random.Random, report: Report) -> None:
        self.place, self.family, self.is_poisoned = place, family, is_poisoned
        self.dice, self.report = dice, report
        self.save, self.temporary, self.log = place / "save", place / "tmp", place / "losses"
        self.temporary.mkdir(parents=True)
        self.has_disk = dice.random() < 0.5 and mount(self.save)

    def start(self, layout: Layout, *flags: object, srun: bool = False) -> Run:
        number, own = layout
        self.report.layouts.add(f"{self.family} {number} {own}".strip())
        variables = {"LOSS_LOG": str(self.log), "TMPDIR": str(self.temporary)}
        if self.is_poisoned:
            ranks = ",".join(map(str, range(number)))
            variables |= {"FAULT": "batch", "FAULT_RANK": ranks, "FAULT_STEP": str(BAD_BATCH)}
            variables["PYTHONPATH"] = f"{REPOSITORY}/tests/faults:{REPOSITORY}"
            flags = ("--on-nan", "rollback", *flags)
        return Run.start(
            number,
            *("--num-layers", 4, "--engine", self.family, *own.split()),
            *("--steps", STEPS, "--save", self.save, "--load", self.save, "--save-every", 1, "--keep", KEEP),
            *("--stall-seconds", STALL_SECONDS, "--callbacks", "tests.chaos.loss_log:LossLog", *flags),
            torchrun=("--shutdown-timeout", "5"),
            srun=srun,
            **variables,
        )

    def good_steps(self) -> list[int]:
        return [step for step in steps_in(self.save) if looks_good(folder_of(self.save, step))]

    def reference(self) -> dict[Key, float]:
        """The losses of an undisturbed run of one process."""
        run = self.start((1, "--zero-stage 1" if self.family == "deepspeed" else ""))
        assert run.finish(300) == 0, run.output
        return dict(read_losses(self.log))

    def disturb(self, expected: Mapping[Key, float]) -> bool:
        """Resume under another layout, disturb the run once, and check what it leaves. False if the run was faster."""
        dice, report = self.dice, self.report
        damage, damaged = ("", None) if self.is_poisoned else self._damage()
        before, known = [step for step in self.good_steps() if step != damaged], len(read_losses(self.log))
        layout = dice.choice(FAMILIES[self.family])
        srun = layout[0] > 1 and dice.random() < 0.25
        phase, number = dice.choice(PHASES), dice.choice(SIGNALS)
        victim = "parent" if not srun and dice.random() < 0.3 else f"rank {dice.randrange(layout[0])}"
        if layout[0] == 1 and victim != "parent" and number == signal.SIGSTOP:  # no other rank could notice
            number = signal.SIGKILL
        if srun and victim == "rank 0" and phase == "start" and number == signal.SIGSTOP:
            number = signal.SIGKILL  # until rank 0 has opened the store, the others wait for it for ten minutes
        run = self.start(layout, srun=srun)
        if not self._wait_for(run, phase):
            self._finish(run, expected, known, before)
            return False
        with self._disk_trouble() as trouble:
            seconds = self._end(run, victim, number)
        what = f"{self.family} {layout[1] or 'dp'} on {layout[0]}{' by srun' if srun else ''}"
        report.tell(
            f"{number.name} of {victim} during {phase}; {what}{damage}{trouble}; ended in {seconds:.1f} s; "
            f"good {before[:1]} -> {self.good_steps()[:1]}"
        )
        self._check(run, expected, known, before)
        return True

    def finish(self, expected: Mapping[Key, float]) -> None:
        """Train to the end without disturbance."""
        before, known = self.good_steps(), len(read_losses(self.log))
        self._finish(self.start(self.dice.choice(FAMILIES[self.family])), expected, known, before)

    def close(self) -> None:
        if self.has_disk:
            unmount(self.save)
        shutil.rmtree(self.place, ignore_errors=True)

    def _finish(self, run: Run, expected: Mapping[Key, float], known: int, before: list[int]) -> None:
        status = run.finish(300)
        self.report.check(status == 0, f"an undisturbed run ended with status {status}: {run.output[-1500:]}")
        self._check(run, expected, known, before)

    def _wait_for(self, run: Run, phase: str) -> bool:
        """Wait for a moment in the phase, or up to 12 s if the run has none. False if the run has ended."""
        dice, began = self.dice, time.monotonic()
        partial = set(self.save.glob(".step-*.partial"))
        seconds, times = dice.uniform(0.0, 5.0) if phase == "start" else 12.0, dice.randrange(1, 5)
        run.read_in_background()
        while run.process.poll() is None and time.monotonic() - began < seconds:
            seen = len(re.findall(_PATTERNS[phase], run.output, re.MULTILINE)) if phase in _PATTERNS else 0
            if seen >= (times if phase == "step" else 1):
                break
            if phase == "save" and set(self.save.glob(".step-*.partial")) - partial:
                break
            time.sleep(0.002)
        time.sleep(dice.uniform(0.0, 0.03))
        return run.process.poll() is None

    def _end(self, run: Run, victim: str, number: signal.Signals) -> float:
        """Send the signal, and return the seconds until the last process has ended."""
        while not (process := self._find(run, victim)) and run.process.poll() is None:
            time.sleep(0.02)
        began = time.monotonic()
        with suppress(psutil.NoSuchProcess):
            if process:
                process.send_signal(number)
            if victim == "parent" and number == signal.SIGSTOP:  # the ranks continue without their parent
                time.sleep(2.0)
                run.process.send_signal(signal.SIGCONT)
                run.process.send_signal(signal.SIGTERM)
        while run.process.poll() is None or run.alive():
            if time.monotonic() - began > END_SECONDS:
                left = run.alive()
                self.report.check(False, f"still running after {END_SECONDS:.0f} s: {left}; {run.output[-2000:]}")
                for each in [*left, psutil.Process(run.process.pid)]:
                    each.kill()
                break
            time.sleep(0.05)
        self.report.seconds_to_end.append(time.monotonic() - began)
        return self.report.seconds_to_end[-1]

    @staticmethod
    def _find(run: Run, victim: str) -> psutil.Process | None:
        """The process of the victim, or None if it does not run yet."""
        try:
            return psutil.Process(run.process.pid) if victim == "parent" else run.rank(int(victim.split()[1]))
        except (StopIteration, psutil.NoSuchProcess):
            return None

    def _check(self, run: Run, expected: Mapping[Key, float], known: int, before: list[int]) -> None:
        report, good = self.report, self.good_steps()
        losses = read_losses(self.log)
        for key, loss in losses[known:]:
            report.check(key in expected, f"(rollbacks, step) {key} does not occur in an undisturbed run")
            difference = abs(loss - expected.get(key, loss)) / abs(loss) if loss == loss else 0.0
            report.worst_difference = max(report.worst_difference, difference)
            report.check(difference < TOLERANCE, f"loss {loss} at {key}, but {expected.get(key)} is right")
        if losses[known:] and known:
            (last_rollbacks, last), (rollbacks, first) = losses[known - 1][0], losses[known][0]
            if last_rollbacks == rollbacks:
                report.steps_lost.append(max(0, last + 1 - first))
        newest_allowed = before[0] if before else 0
        if self.is_poisoned:  # a rollback sets newer checkpoints aside
            newest_allowed = min(newest_allowed, BAD_BATCH - 2)
        report.check(
            not before or (good and good[0] >= newest_allowed), f"good checkpoints {before} before, {good} after"
        )
        # torchrun's logs stay if torchrun is killed, and torch.compile keeps its cache
        torchs_own = ("torchelastic_", "torchinductor_")
        left = [path.name for path in self.temporary.iterdir() if not path.name.startswith(torchs_own)]
        report.check(not left, f"left in the temporary directory: {left}")
        report.check(not run.alive(), f"orphans: {run.alive()}")

    def _damage(self) -> tuple[str, int | None]:
        """Damage the newest checkpoint now and then; an older one must then be resumed. Return what, and the step."""
        good = self.good_steps()
        if len(good) < 2 or self.dice.random() > 0.25:
            return "", None
        newest = folder_of(self.save, good[0])
        if newest.is_symlink():  # an earlier damage
            return "", None
        kind = self.dice.choice(["truncated", "bit-flipped", "deleted", "linked"])
        if kind == "deleted":
            shutil.rmtree(newest)
        elif kind == "linked":  # the checkpoint is elsewhere, and must be read through the link
            elsewhere = self.place / f"elsewhere-{time.monotonic_ns()}"
            shutil.move(newest, elsewhere)
            newest.symlink_to(elsewhere)
            return ", newest checkpoint linked", None
        else:
            victim = self.dice.choice(sorted(newest.glob("*.safetensors")))
            content = bytearray(victim.read_bytes())
            if kind == "truncated":
                content = content[: len(content) // 2]
            else:
                content[self.dice.randrange(len(content) // 2, len(content))] ^= 1 << self.dice.randrange(8)
            victim.write_bytes(content)
        return f", newest checkpoint {kind}", good[0]

    @contextmanager
    def _disk_trouble(self) -> Iterator[str]:
        """Fill the disk, make it read-only or take the directory away for two seconds, now and then."""
        # which step a rollback returns to depends on the steps that could be saved
        if self.is_poisoned or self.dice.random() > 0.2 or not self.save.is_dir():
            yield ""
            return
        kind = self.dice.choice(["full", "read-only", "gone"] if self.has_disk else ["gone"])
        filler, away = self.save / "filler", self.place / "away"
        if kind == "full":
            with suppress(OSError), filler.open("wb") as file:
                while True:
                    file.write(bytes(2**16))
                    file.flush()
        elif kind == "read-only":
            remount(self.save, "ro")
        elif not self.has_disk:
            self.save.rename(away)
        time.sleep(2.0)
        yield f", disk {kind}"
        if kind == "read-only":
            remount(self.save, "rw")
        elif kind == "gone" and not self.has_disk:
            shutil.rmtree(self.save, ignore_errors=True)  # a run may have created the directory again
            away.rename(self.save)
        filler.unlink(missing_ok=True)


def mount(folder: Path) -> bool:
    """Mount a small disk in memory; False if this user may not."""
    folder.mkdir()
    return not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], capture_output=True
    ).returncode


def remount(folder: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", folder], capture_output=True, check=False)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", folder], capture_output=True, check=False)
