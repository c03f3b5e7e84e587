"""Diagnosis rules for a planned study: trials that do not fit, and layouts that beat all trials. Loads no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from megabench.doctor.failure_rules import less_memory
from megabench.doctor.finding import MOST_SHOWN, Case, Finding, Rule
from megabench.doctor.predicted_trials import EVEN, PlannedTrial, PredictedTrial
from megabench.hardware.gpus import find_gpu
from megabench.planner.costs import Estimate
from megabench.settings.setting import names
from megabench.specs.all_settings import SETTINGS, engines_with
from megabench.study.planned_trials import COMPARED, settings_beside

# settings of a trial that the trial of a plan does not take over
_LEFT_OUT = {*COMPARED, *names(SETTINGS, role="watch"), *names(SETTINGS, role="output")}


def rules_for(trials: Sequence[PredictedTrial], base: Mapping[str, Any], num_processes: int) -> tuple[Rule, ...]:
    """Return the rules that compare trials with plans. `base` are the settings of all trials of the study."""
    comparison = _Comparison(trials, base, num_processes)
    return comparison.lack_memory, comparison.beaten


def refused(trials: Sequence[PlannedTrial], refusals: Mapping[str, str]) -> Rule:
    """Return the rule that reports trials whose GPUs or precision the planner refuses, with its reasons by trial."""

    def not_predicted(case: Case) -> Iterator[Finding]:
        for trial in trials:
            if not (reason := refusals.get(trial.record.trial)):
                continue
            gpus = [find_gpu(host.device) for host in trial.topology.hosts]
            lacks = any(gpu and gpu.peak_tflops(trial.run.precision) is None for gpu in gpus)
            yield Finding(
                "fails" if lacks else "note",
                (trial.record.trial,),
                "the GPUs lack the precision of the trial" if lacks else "memory and speed of the trial are unknown",
                f"not predicted: {reason}",
                "set another precision" if lacks else "measure the trial, or plan for GPUs that the planner knows",
            )

    return not_predicted


@dataclass(frozen=True)
class _Comparison:
    """The trials of a study, the settings of its base, and the number of processes of its launch."""

    trials: Sequence[PredictedTrial]
    base: Mapping[str, Any]
    num_processes: int

    def lack_memory(self, case: Case) -> Iterator[Finding]:
        """Report trials that the plan does not count as fitting into GPU memory."""
        for trial in self.trials:
            if trial.estimate.fits:
                continue
            chance, remedy = trial.estimate.fit_chance, less_memory(trial.trial.record)
            if best := self._best_layout(trial):
                remedy = f"use the layout that the plan recommends, {best[0].candidate.name}: {best[1]}"
                remedy += f" (predicted: {trial.numbers(best[0])})"
            elif trial.plan and not trial.plan.ranked:
                remedy += "; no other layout is predicted to fit on these GPUs"
            yield Finding(
                "fails" if chance < EVEN else "note",
                (trial.name,),
                f"the trial {'is predicted to' if chance < EVEN else 'may'} run out of GPU memory",
                f"predicted: {trial.numbers(trial.estimate)}; the chance to fit is "
                f"{f'{chance:.0%}' if chance >= 0.01 else 'below 1%'}",
                remedy,
            )

    def beaten(self, case: Case) -> Iterator[Finding]:
        """Report a layout of the plan that is faster than every trial with the same work on the same GPUs."""
        groups: dict[int, list[PredictedTrial]] = {}
        for trial in self.trials:
            if trial.plan and trial.estimate.fits:
                groups.setdefault(id(trial.plan), []).append(trial)
        for members in groups.values():
            members.sort(key=lambda trial: trial.estimate.step_seconds)
            fastest = members[0]
            if not fastest.is_unbeaten and (best := self._best_layout(fastest)):
                yield _faster_layout(members, *best)

    def _best_layout(self, trial: PredictedTrial) -> tuple[Estimate, str] | None:
        """Return the first layout of the plan for the work of a trial, and the settings of a trial that trains it."""
        if trial.plan is None or not trial.plan.ranked:
            return None
        best, record = trial.plan.ranked[0], trial.trial.record
        planned = settings_beside(self.base, best.candidate)
        given = trial.trial.given.flat(mode="json", exclude_unset=True)
        common = {name: value for name, value in given.items() if not engines_with(name) and name not in _LEFT_OUT}
        if not trial.is_valid(common | planned):
            return None
        own = {name: value for name, value in common.items() if self.base.get(name) != value} | planned
        if record.world_size != self.base.get("world_size", self.num_processes):
            own["world_size"] = record.world_size
        return best, yaml.safe_dump(own, default_flow_style=True, sort_keys=False, width=10_000).strip()


def _faster_layout(trials: Sequence[PredictedTrial], best: Estimate, settings: str) -> Finding:
    """Return the finding that a layout beats these trials, the fastest of which comes first."""
    gains = [
        f"{trial.gain(best):.2f} × as fast as {trial.name} ({trial.estimate.step_seconds:.3g} s per step)"
        for trial in trials[:MOST_SHOWN]
    ]
    gains += [f"faster than {len(trials) - MOST_SHOWN} more trials"] if len(trials) > MOST_SHOWN else []
    return Finding(
        "slow",
        tuple(trial.name for trial in trials),
        "the plan has a layout that is predicted to be faster than every trial with this work",
        f"predicted for {best.candidate.name}: {trials[0].numbers(best)}, {', '.join(gains)}; {trials[0].origin}",
        f"add a trial {settings}; this is a prediction, so measure both",
    )
