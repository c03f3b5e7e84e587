"""Kills ranks at random moments, half of them during a save, and runs the same command again each time.

`python -m tests.train.kills --kills 50`: every run must end within a minute and leave no process, no checkpoint may be
lost, and the losses, all the way through the kills, must be those of a run that nobody disturbed.
"""

import argparse
import random
import re
import shutil
import tempfile
import time
from pathlib import Path

from megabench.checkpoint.directory import folder_of, looks_good, steps_in
from tests.train.resilience import Run, losses

END_SECONDS = 60.0
WHOLE_SECONDS = 600.0  # of a run that nobody disturbs
TOLERANCE = 1e-5
_PARTIAL = ".step-*.partial"  # a save that is under way, or that was killed


def kill_many(num_kills: int, folder: Path, layout: list[str], seed: int, num_steps: int = 100) -> list[str]:
    """Carries out the kills, in `folder`; a line about each. AssertionError for the first thing that is not right."""
    dice = random.Random(seed)
    reference = _whole_run(folder / "reference", layout, num_steps)
    told: list[str] = []
    chain = 0
    while len(told) < num_kills or (folder / f"chain-{chain}").exists():
        place = folder / f"chain-{chain}"
        run = Run.start(2, *layout, *_flags(place, num_steps), torchrun=("--shutdown-timeout", "5"))
        if len(told) < num_kills:
            line = _kill(run, dice, place / "checkpoints")
            if line:
                told.append(f"kill {len(told) + 1}: {line}")
                print(told[-1], flush=True)
                _compare_lines(run.output, reference)
                continue
        assert run.finish(WHOLE_SECONDS) == 0, run.output
        _compare_lines(run.output, reference)
        if (place / "record.json").exists():  # else the kill came behind the last save
            ended = losses(place)
            worst = max(abs(a - b) / b for a, b in zip(ended, reference[-len(ended) :], strict=True))
            assert worst < TOLERANCE, f"losses differ by {worst:.1e}"
        shutil.rmtree(place)
        chain += 1
    return told


def _flags(place: Path, num_steps: int) -> list[object]:
    save = place / "checkpoints"
    return ["--steps", num_steps, "--save", save, "--load", save, "--save-every", 1, "--keep", 3, "--out", place]


def _whole_run(place: Path, layout: list[str], num_steps: int) -> list[float]:
    run = Run.start(2, *layout, "--steps", num_steps, "--out", place)
    assert run.finish(WHOLE_SECONDS) == 0, run.output
    return losses(place)


def _kill(run: Run, dice: random.Random, save: Path) -> str | None:
    """Kills a rank of `run` at a random moment; None when the run was faster."""
    began = time.monotonic()
    before, remains = _good_steps(save), set(save.glob(_PARTIAL))
    during_save = dice.random() < 0.5
    delay = dice.uniform(0.0, 12.0)
    while time.monotonic() - began < delay and run.process.poll() is None:
        time.sleep(0.01)
    while during_save and run.process.poll() is None and set(save.glob(_PARTIAL)) <= remains:
        time.sleep(0.0005)
    time.sleep(dice.uniform(0.0, 0.02) if during_save else 0.0)
    rank = dice.randrange(2)
    try:
        victim = run.rank(rank)
    except StopIteration:
        if run.process.poll() is not None:
            return None
        time.sleep(1.0)  # torchrun has not started its processes yet
        return _kill(run, dice, save)
    victim.kill()
    killed = time.monotonic()
    run.finish(END_SECONDS)  # with any status: the kill may come behind the last step
    seconds = time.monotonic() - killed
    assert not run.alive(), f"left running: {run.alive()}"
    good = _good_steps(save)
    assert not before or (good and good[0] >= before[0]), f"{before} before, {good} after"
    steps = re.findall(r"^step +(\d+)/", run.output, re.MULTILINE)
    what = "during a save" if during_save else "at any time"
    where = f"after step {steps[-1]}" if steps else "before the first step"
    return f"rank {rank} {what}, {where}; the run ended in {seconds:.1f} s; good: {good[:1] or 'none yet'}"


def _good_steps(save: Path) -> list[int]:
    return [step for step in steps_in(save) if looks_good(folder_of(save, step))]


def _compare_lines(output: str, reference: list[float]) -> None:
    """The losses that were printed, to the four digits that they have."""
    for step, loss in re.findall(r"^step +(\d+)/.*?loss (\S+)", output, re.MULTILINE):
        assert abs(float(loss) - reference[int(step) - 1]) < 1.5e-4, f"step {step}: {loss}, {reference[int(step) - 1]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("layout", nargs="*", default=["--tp", "2"], help="flags of pretrain, behind --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kill_many(given.kills, Path(folder), given.layout, given.seed)
    print(f"{given.kills} kills: every run ended in time and left nothing running; losses as without them")
