"""Add the best predicted layouts to a study (`megabench compare STUDY --plan N`). Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from megabench.config import FIELDS, RunConfig
from megabench.cost.job import Candidate
from megabench.parallel.layout import GIVEN_SIZES
from megabench.planner.make_plan import make_plan
from megabench.planner.predict import Predictor
from megabench.planner.search import settings_of
from megabench.record import RunRecord
from megabench.settings.run_settings import RunSettings
from megabench.specs.all_settings import engines_with
from megabench.study.expand import expand
from megabench.study.study import StudyError, StudyFile

# the settings that determine a prediction; planned trials have those of their candidate, or the defaults
COMPARED = [
    *("engine", *GIVEN_SIZES, "micro_batch", "recompute", "placement"),
    *("zero_stage", "offload", "shard_size", "hpz_size", "reshard_after_forward"),
    *("stages", "keep_gathered", "tp_overlap", "keep_transposed"),
]


@dataclass(frozen=True)
class Planning:
    """The number of predicted layouts to run, the cluster (None means this machine), and the planner's profile."""

    count: int
    cluster: str | None = None
    profile: Path | None = None

    def extend(self, file: StudyFile, source: Path, num_processes: int) -> tuple[StudyFile, Predictor]:
        """Append the planned trials to a study. Return the study, and a predictor for all trials.

        Layouts that the study already contains are not added again. Raises StudyError if planning is impossible or no
        layout fits.
        """
        base = {name: value for name, value in file.defaults.items() if name in RunSettings.model_fields}
        run = RunConfig.parse(base, f"{source}: base: ")
        plan = make_plan(
            run.model,
            self.cluster,
            run.seq_length,
            run.global_batch,
            run.num_layers,
            run.grad_dtype,
            self.profile,
            top=self.count,
            emulate_hosts=run.emulate_hosts,
            num_processes=num_processes,
            precision=run.precision,
            fp8_recipe=run.fp8_recipe,
            num_layers_at_start_in_bf16=run.num_layers_at_start_in_bf16,
            num_layers_at_end_in_bf16=run.num_layers_at_end_in_bf16,
            emulated_gb_per_s=run.emulate_network.gb_per_s if run.emulate_network else None,
            optimizer=run.optimizer,
        )
        if plan.topology.world_size != num_processes:
            raise StudyError(
                f"--cluster {self.cluster} has {plan.topology.world_size} GPUs, and the launch {num_processes} "
                f"processes; plan for the machines that the study runs on"
            )
        if not plan.ranked:
            raise StudyError(f"{source}: no layout of {run.model} is predicted to fit here; see megabench plan")
        own = [
            _compared(base | trial)
            for entry in file.trials
            for trial in expand(entry)
            if (file.base | trial).get("world_size", num_processes) == num_processes
        ]
        added: list[dict[str, Any]] = []
        for number, estimate in enumerate(plan.ranked, 1):
            settings = settings_beside(base, estimate.candidate)
            if _compared(base | settings) not in own:
                added.append({"name": f"plan-{number}", **settings})
        extended = file.model_copy(update={"trials": [*file.trials, *added]})
        return extended, Predictor(plan.topology, plan.profile, [trial["name"] for trial in added])


def settings_beside(base: Mapping[str, Any], candidate: Candidate) -> dict[str, Any]:
    """Return the settings with which a trial trains the candidate in a study with this base.

    The base may set values that the plan leaves at their defaults, or settings that only other engines have.
    """
    defaults = {
        name: FIELDS[name].default
        for name in base
        if name in COMPARED or (name in FIELDS and engines_with(name) and candidate.engine not in engines_with(name))
    }
    return defaults | settings_of(candidate)


def _compared(fields: dict[str, Any]) -> tuple[object, ...]:
    return tuple(fields.get(name, FIELDS[name].default) for name in COMPARED)


def regret_sentence(records: list[RunRecord]) -> str | None:
    """Describe whether the best predicted trial was the fastest measured one. Return None if it is not known."""
    timed = [record for record in records if record.prediction and record.step_seconds and record.status == "ok"]
    if not any(record.prediction and record.prediction.planned_rank for record in timed):
        return None
    predicted = {record.trial: record.prediction.step_seconds for record in timed if record.prediction}
    measured = {
        trial: mean(run.step_seconds.median for run in timed if run.trial == trial and run.step_seconds)
        for trial in predicted
    }
    chosen, best = (min(seconds, key=seconds.__getitem__) for seconds in (predicted, measured))
    error = mean(abs(predicted[trial] / measured[trial] - 1) for trial in predicted)
    said = f"The plan would have chosen {chosen}"
    if chosen == best:
        said += ", the best that was measured (regret 1.00)"
    else:
        said += f", and the best that was measured is {best} (regret {measured[chosen] / measured[best]:.2f})"
    return f"{said}; predicted steps were off by {100 * error:.0f}% in the mean."
