"""Run the chaos suite, with kills or with rollbacks, and print its summary."""

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

from tests.chaos.chain import FAMILIES, Chain, Report
from tests.chaos.loss_log import Key
from tests.chaos.rollbacks import run_rollbacks


def run_suite(num_kills: int, seed: int, folder: Path) -> Report:
    """Disturb runs `num_kills` times. Every chain of runs ends with a run that nothing disturbs."""
    dice, report = random.Random(seed), Report()
    expected: dict[tuple[str, bool], dict[Key, float]] = {}
    families = [family for family in FAMILIES for _ in FAMILIES[family]]
    shared_memory = set(Path("/dev/shm").iterdir())
    number = 0
    while len(report.told) < num_kills:
        number += 1
        kind = family, is_poisoned = dice.choice(families), dice.random() < 0.35
        if kind not in expected:
            reference = Chain(folder / f"reference-{number}", family, is_poisoned, dice, report)
            expected[kind] = reference.reference()
            reference.close()
        chain = Chain(folder / f"chain-{number}", family, is_poisoned, dice, report)
        for _ in range(dice.randrange(3, 8)):
            if len(report.told) == num_kills or not chain.disturb(expected[kind]):
                break
        chain.finish(expected[kind])
        chain.close()
    left = {path.name for path in set(Path("/dev/shm").iterdir()) - shared_memory}
    report.check(not left, f"left in /dev/shm: {left}")
    return report


def summary(report: Report) -> str:
    seconds, lost = report.seconds_to_end, report.steps_lost
    mean_lost = statistics.mean(lost) if lost else 0.0
    return "\n".join(
        [
            f"kills: {len(report.told)} over {len(report.layouts)} layouts: {', '.join(sorted(report.layouts))}",
            f"problems: {len(report.problems)}",
            f"worst relative loss difference: {report.worst_difference:.1e}",
            f"steps lost: {max(lost, default=0)} at most, {mean_lost:.2f} on average (a save after every step)",
            f"seconds from signal to end: {statistics.median(seconds):.1f} in the median, {max(seconds):.1f} at most",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--kills", type=int, default=100)
    number.add_argument("--rollbacks", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.rollbacks:
            findings = run_rollbacks(given.rollbacks, given.seed, Path(folder))
            print(findings)
            return 1 if findings.problems else 0
        report = run_suite(given.kills, given.seed, Path(folder))
    print(summary(report))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
