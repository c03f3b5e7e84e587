"""`megabench plan --layout`: print a person's own layout beside the recommended one. Loads no torch."""

import json
from typing import Any

from rich.console import Console
from rich.text import Text

from megabench.planner.costs import Estimate
from megabench.planner.layout_table import Training, layout_columns, print_table
from megabench.planner.measured_step import explanations, read_measured
from megabench.planner.own_layout import find_own, read_layout
from megabench.planner.plan_json import describe_estimate, describe_training
from megabench.planner.reasons import GIB, NOTEWORTHY, chance_text, chosen, why, why_nothing_fits
from megabench.planner.search import Plan
from megabench.planner.train_command import train_command


class OwnLayoutReport:
    """A person's own layout at its best, beside the recommended one.

    `text` names the layout, and `measured` is its measured step: the seconds as text, or the path of a log. Raises
    ConfigError if the layout is not understood or impossible, or if the log has no step time.
    """

    def __init__(self, plan: Plan, text: str, measured: str | None) -> None:
        self.plan = plan
        own = read_layout(text)
        step = read_measured(measured, plan.job) if measured else None
        self.estimate = find_own(plan, own)
        self.measured_seconds = step.seconds if step else None
        self.explanations = explanations(plan, own, self.estimate, step) if step else []

    @property
    def ratio(self) -> float | None:
        """The step time of this layout ÷ that of the recommended one, or None if no layout is likely to fit."""
        return self.estimate.step_seconds / chosen(self.plan).step_seconds if self.plan.ranked else None

    @property
    def verdict(self) -> str:
        """Sentences that compare this layout with the recommended one."""
        own, name = self.estimate, self.estimate.candidate.name
        if self.ratio is None:
            return why_nothing_fits(self.plan)
        best = chosen(self.plan)
        if best.candidate == own.candidate:
            return f"{name} is the recommended layout."
        risk = f" Its chance to fit is {chance_text(own)}: it lacks {own.missing_bytes / GIB:.1f} GiB per GPU."
        end = risk * (not own.fits)
        if self.ratio < 1 + NOTEWORTHY:
            faster = f"{100 * (1 / self.ratio - 1):.0f}% faster than" if self.ratio < 1 - NOTEWORTHY else "as fast as"
            return f"{name} would be {faster} the recommended {best.candidate.name}.{end}"
        start = f"The recommended {best.candidate.name} is {self.ratio:.2f} × as fast as {name}"
        return f"{start}. Yours takes {why(best, own)}.{end}"

    def write(self, console: Console, training: Training | None) -> None:
        """Print the verdict, both layouts as a table, the explanation of the measured step, and both commands."""
        console.print(Text(self.verdict, style="bold"))
        rows = [("yours", self.estimate)]
        if self.plan.ranked and chosen(self.plan).candidate != self.estimate.candidate:
            rows.append(("best", chosen(self.plan)))
        console.print()
        print_table(console, layout_columns(rows, training))
        for line in self.explanations:
            console.print(Text(f"{'- ' * (line != self.explanations[0])}{line}"))
        for label, estimate in rows:
            console.print(Text(f"\nTo train {'the best one' if label == 'best' else label}:", style="bold"))
            console.print(Text(train_command(self.plan, estimate.candidate)), soft_wrap=True)

    def as_json(self, training: Training | None) -> str:
        """Return the report as JSON."""
        found: dict[str, Any] = {
            "layout": self._described(self.estimate, training),
            "recommended": self._described(chosen(self.plan), training) if self.plan.ranked else None,
            "ratio": self.ratio,
            "reason": self.verdict,
        }
        if self.measured_seconds is not None:
            found |= {"measured_seconds": self.measured_seconds, "explanations": self.explanations}
        return json.dumps(found, indent=2)

    def _described(self, estimate: Estimate, training: Training | None) -> dict[str, Any]:
        command = {"command": train_command(self.plan, estimate.candidate)}
        return describe_estimate(estimate) | command | describe_training(training, estimate)
