"""Watches that losses and gradients stay finite."""

import math

from megabench.config import ResolvedConfig
from megabench.engines.base import StepResult


class FiniteWatch:
    """Counts the steps in a row that went wrong, and ends the run after more than `nan_tolerance` of them.

    A step that was skipped left the weights as they were; one that was not (DeepSpeed updates with anything under
    ZeRO 0 to 2 in fp32) ends the run at once. fp16 skips steps to find its loss scale, which is no fault while the loss
    is finite.
    """

    def __init__(self, run: ResolvedConfig) -> None:
        self._run = run
        self.num_in_a_row = 0

    def is_wrong(self, result: StepResult) -> bool:
        """Takes in the result of the next step; whether it went wrong."""
        wrong = not math.isfinite(result.loss) or (result.skipped and self._run.precision != "fp16")
        self.num_in_a_row = self.num_in_a_row + 1 if wrong else 0
        return wrong

    def reason_to_stop(self, step: int, result: StepResult, rank_losses: list[float], hosts: list[str]) -> str | None:
        """A sentence when the step that just went wrong, counted from 1, was one too many.

        `rank_losses` and `hosts` go by rank.
        """
        if result.skipped and self.num_in_a_row <= self._run.nan_tolerance:
            return None
        wrong = [rank for rank, loss in enumerate(rank_losses) if not math.isfinite(loss)]
        what = "gradients are" if math.isfinite(result.loss) else f"loss is {result.loss}, which is"
        where = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in wrong[:4]) or "no rank's own loss is at fault"
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        weights = "the weights are as they were before" if result.skipped else "the weights were updated with them"
        return (
            f"the {what} not finite at step {step} of {self._run.steps}, the {_ordinal(self.num_in_a_row)} in a row "
            f"(nan_tolerance={self._run.nan_tolerance}): {where}{more}; {weights}"
        )


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
