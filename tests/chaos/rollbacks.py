"""Runs that roll back again and again: every checkpoint that they leave must be the one of an undisturbed run."""

import json
import random
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from megabench.checkpoint.directory import folder_of, steps_in
from megabench.record import Rollback, RunRecord
from tests.chaos.chain import Layout
from tests.chaos.rollback_log import problem_of
from tests.train.resilience import Run

STEPS = 20
LAYOUTS: tuple[Layout, ...] = (
    (2, "--tp 2"),
    (2, "--pp 2"),
    (2, ""),
    (2, "--engine deepspeed --zero-stage 2"),
    (2, "--engine fsdp"),
    (2, "--engine ddp"),
    (3, "--micro-batch 2 --global-batch 6"),
    (4, "--tp 2 --pp 2"),
    (4, "--engine deepspeed --zero-stage 3"),
)


@dataclass(frozen=True)
class Plan:
    """One run: its layout, how it saves, and the batches that poison its weights, counted from 0."""

    layout: Layout
    mode: str
    save_every: int
    keep: int | None
    bad: frozenset[int]
    slow_rank: int
    slow_seconds: float
    is_slow_after_writing: bool = True

    @classmethod
    def drawn(cls, dice: random.Random) -> "Plan":
        layout, save_every = dice.choice(LAYOUTS), dice.choice((1, 1, 2, 2, 3, 4))
        # the first healthy checkpoint exists when a step after it was finite
        bad = dice.sample(range(save_every + 1, STEPS), k=dice.randrange(3, 9))
        return cls(
            layout=layout,
            mode=dice.choice(("sync", "async")),
            save_every=save_every,
            keep=dice.choice((1, 1, 2, 3, None)),
            bad=frozenset(bad),
            slow_rank=dice.randrange(layout[0]),
            slow_seconds=dice.choice((0.0, 0.05, 0.3)),
            is_slow_after_writing=dice.random() < 0.5,
        )

    def __str__(self) -> str:
        number, flags = self.layout
        late = "reports" if self.is_slow_after_writing else "writes"
        slow = f", rank {self.slow_rank} {late} {self.slow_seconds} s late" if self.slow_seconds else ""
        return (
            f"{flags or 'dp'} on {number}, {self.mode} saves every {self.save_every}, keep {self.keep}{slow}; "
            f"bad batches {sorted(self.bad)}"
        )

    def rollbacks(self) -> list[tuple[int, int, int]]:
        """The expected rollbacks: (step, restored step, next batch)."""
        made: list[tuple[int, int, int]] = []
        saved: set[int] = set()
        step, batch, proven = 1, 0, -1  # `proven`: the step up to which checkpoints are healthy
        while step <= STEPS:
            if batch in self.bad:
                restored = max(older for older in saved if older <= proven)
                made.append((step, restored, batch + 1))
                saved = {older for older in saved if older <= restored}
                step, proven = restored, restored
            else:
                proven = max(proven, step - 1)
                if step % self.save_every == 0 or step == STEPS:
                    saved.add(step)
            step, batch = step + 1, batch + 1
        return made


@dataclass
class Findings:
    """What all runs together have shown. `problems` must stay empty."""

    num_rollbacks: int = 0
    num_runs: dict[str, int] = field(default_factory=lambda: {"sync": 0, "async": 0})
    num_inspected: int = 0
    num_compared: int = 0
    num_damaged_at_end: int = 0
    damaged: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    worst_difference: float = 0.0

    def check(self, is_right: object, problem: str) -> None:
        if not is_right:
            self.problems.append(problem)
            print(f"WRONG: {problem}", flush=True)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"rollbacks: {self.num_rollbacks} in {self.num_runs['sync']} synchronous and "
                f"{self.num_runs['async']} asynchronous runs",
                f"checkpoints: {len(self.damaged)} damaged at a save; of the {self.num_inspected} at "
                f"the end, {self.num_damaged_at_end} damaged and {self.num_compared} compared with an undisturbed run",
                f"worst difference of a weight or moment: {self.worst_difference:.1e}",
                f"problems: {len(self.problems)}",
            ]
        )


def run_rollbacks(num_rollbacks: int, seed: int, folder: Path) -> Findings:
    """Disturb runs until they have rolled back `num_rollbacks` times."""
    dice, findings = random.Random(seed), Findings()
    number = 0
    while findings.num_rollbacks < num_rollbacks and len(findings.problems) < num_rollbacks:
        number += 1
        place, plan = folder / f"run-{number}", Plan.drawn(dice)
        place.mkdir()
        roll_back(plan, place, findings)
        print(f"{findings.num_rollbacks}: {plan}", flush=True)
        shutil.rmtree(place)
    return findings


def roll_back(plan: Plan, place: Path, findings: Findings) -> None:
    """Train a run with bad batches, and compare what it leaves with a run that trains on the remaining batches."""
    number, flags = plan.layout
    common = ("--num-layers", 4, "--steps", STEPS, *flags.split())
    save, damaged = place / "save", place / "damaged"
    poison = asdict(plan) | {"bad": sorted(plan.bad), "damaged": str(damaged)}
    keep = () if plan.keep is None else ("--keep", plan.keep)
    run = Run.start(
        number,
        *(*common, "--save", save, "--save-every", plan.save_every, *keep, "--save-mode", plan.mode),
        *("--on-nan", "rollback", "--nan-tolerance", 0, "--max-rollbacks", 99, "--out", place / "out"),
        *("--callbacks", "tests.chaos.rollback_log:Poison"),
        ROLLBACKS=json.dumps(poison),
    )
    status = run.finish(300)
    findings.num_runs[plan.mode] += 1
    findings.check(status == 0, f"status {status} of {plan}: {run.output[-1500:]}")
    findings.check("ERROR: no checkpoint" not in run.output, f"a save of {plan} failed: {run.output[-1500:]}")
    found = damaged.read_text(encoding="utf-8").splitlines() if damaged.exists() else []
    findings.num_rollbacks += run.output.count("ROLLBACK ")
    left = sorted(save.glob("step-*"))
    at_end = [f"{path.name} at the end: {problem}" for path in left if (problem := problem_of(path))]
    findings.num_inspected += len(left)
    findings.num_damaged_at_end += len(at_end)
    findings.damaged += found
    findings.check(not found + at_end, f"damaged checkpoints of {plan}: {found + at_end}")
    if status == 0:
        made = RunRecord.read(place / "out" / "record.json").rollbacks
        short = [(rollback.step, rollback.restored_step, rollback.next_batch) for rollback in made]
        findings.check(short == plan.rollbacks(), f"rollbacks {short} of {plan} instead of {plan.rollbacks()}")
        _check_steps(plan, save, findings)
        _compare(plan, place, common, made, findings)


def _check_steps(plan: Plan, save: Path, findings: Findings) -> None:
    """The newest `keep` checkpoints exist, and the newest healthy one."""
    steps = steps_in(save)
    last_rollback = max((restored for _, restored, _ in plan.rollbacks()), default=0)
    saved = {step for step in range(last_rollback + 1, STEPS + 1) if step % plan.save_every == 0} | {STEPS}
    newest = sorted(saved, reverse=True)[: max(2, plan.keep or STEPS)]
    findings.check(set(newest) <= set(steps), f"checkpoints {steps} of {plan}, without all of {newest}")
    most = max(2, plan.keep) if plan.keep else STEPS
    findings.check(len(steps) <= most, f"{len(steps)} checkpoints of {plan}: {steps}")


def _compare(plan: Plan, place: Path, common: tuple[object, ...], made: list[Rollback], findings: Findings) -> None:
    rollbacks = json.dumps({"rollbacks": [rollback.model_dump() for rollback in made]})
    callback, reference = ("--callbacks", "tests.chaos.rollback_log:Repeat"), place / "reference"
    saving = ("--save", reference, "--save-every", plan.save_every)
    run = Run.start(plan.layout[0], *common, *saving, *callback, ROLLBACKS=rollbacks)
    assert run.finish(300) == 0, run.output
    for step in steps_in(place / "save"):
        difference = largest_difference(folder_of(place / "save", step), folder_of(reference, step))
        findings.num_compared += 1
        findings.worst_difference = max(findings.worst_difference, difference)
        findings.check(difference < 1e-6, f"step {step} of {plan} differs by {difference} from an undisturbed run")


def largest_difference(first: Path, second: Path) -> float:
    """The largest absolute difference between two checkpoints of one layout."""
    ours, theirs = _blocks(first), _blocks(second)
    assert ours.keys() == theirs.keys()
    return max(float((values - theirs[key]).abs().max()) for key, values in ours.items())


def _blocks(folder: Path) -> dict[str, Tensor]:
    return {key: values for path in folder.glob("*.safetensors") for key, values in load_file(path).items()}
