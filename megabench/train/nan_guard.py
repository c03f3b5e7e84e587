"""Check that losses and gradients stay finite, and that the loss does not jump."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from megabench.checkpoint.health import describe_non_finite
from megabench.config import ResolvedConfig
from megabench.engines.base import StepResult

_WINDOW = 50  # number of losses in the running median
_LEAST_LOSSES = 10  # a median of fewer losses is not meaningful


class NanGuard:
    """Counts consecutive non-finite steps, and finds loss spikes. `recent_losses` are those before the first step.

    The run must end after more than `nan_tolerance` consecutive non-finite steps.

    A skipped step does not update the weights. The run ends at once if the weights were updated (DeepSpeed
    updates them in any case under ZeRO 0 to 2 in fp32), or if weights or moments are not finite: no later step can
    recover. fp16 skips steps to find its loss scale, which is no fault while the loss is finite.
    """

    def __init__(self, run: ResolvedConfig, recent_losses: Sequence[float] = ()) -> None:
        self._run = run
        self.restart(recent_losses)

    def restart(self, recent_losses: Sequence[float]) -> None:
        """Continue from a checkpoint with these recent losses."""
        self.num_in_a_row = 0
        self._losses = deque(recent_losses, _WINDOW)

    @property
    def recent_losses(self) -> tuple[float, ...]:
        return tuple(self._losses)

    def spike(self, result: StepResult) -> str | None:
        """Record the loss of the next step. Return an error message if the run must be rolled back because of it.

        The running median excludes spikes.
        """
        usual = statistics.median(self._losses) if len(self._losses) >= _LEAST_LOSSES else math.inf
        if self._run.on_nan == "rollback" and result.loss > self._run.spike_multiple * usual:
            return (
                f"the loss is {result.loss:.4g}, more than spike_multiple={self._run.spike_multiple:g} times the "
                f"median {usual:.4g} of the last {len(self._losses)} losses"
            )
        if math.isfinite(result.loss):
            self._losses.append(result.loss)
        return None

    def is_wrong(self, result: StepResult) -> bool:
        """Record the result of the next step. Return whether its loss or gradients are not finite."""
        is_finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
        is_scaling = self._run.policy.scales_loss and result.skipped and math.isfinite(result.loss)
        wrong = not is_finite and not is_scaling
        self.num_in_a_row = self.num_in_a_row + 1 if wrong else 0
        return wrong

    def must_stop(self, result: StepResult, non_finite: Mapping[str, int] | None) -> bool:
        """Return whether the run must stop after this non-finite step; for `non_finite` see `describe`."""
        return not result.skipped or bool(non_finite) or self.num_in_a_row > self._run.nan_tolerance

    def describe(
        self,
        step: int,
        result: StepResult,
        rank_losses: list[float],
        hosts: list[str],
        non_finite: Mapping[str, int] | None,
    ) -> str:
        """Describe what is not finite at `step`, counted from 1, on which rank, and whether the weights were updated.

        `rank_losses` and `hosts` are indexed by rank; `non_finite` is the number of NaN and infinite values in the
        training state of all ranks, or None if the state cannot be read.
        """
        wrong = [rank for rank, loss in enumerate(rank_losses) if not math.isfinite(loss)]
        what = "gradients are" if math.isfinite(result.loss) else f"loss is {result.loss}, which is"
        where = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in wrong[:4]) or "no rank's own loss is at fault"
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        return (
            f"the {what} not finite at step {step} of {self._run.steps}, the {_ordinal(self.num_in_a_row)} in a row "
            f"(nan_tolerance={self._run.nan_tolerance}): {where}{more}; {_weights(result.skipped, non_finite)}"
        )


def _weights(skipped: bool, non_finite: Mapping[str, int] | None) -> str:
    """Describe whether the step updated the weights, and whether the weights are still finite."""
    if non_finite:
        link = "were not updated, but" if skipped else "were updated with them, and"
        return f"the weights {link} {describe_non_finite(non_finite)}"
    if not skipped:
        return "the weights were updated with them"
    return "the weights were not updated" + (", and are finite" if non_finite is not None else "")


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
