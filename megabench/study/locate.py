"""Find out whether the difference between a trial and the reference is rounding, and where it begins."""

from collections.abc import Mapping, Sequence
from typing import Any

from megabench.config import RunConfig
from megabench.errors import UserError
from megabench.record import RunRecord
from megabench.study.study import Study, StudyError, StudyFile, Trial
from megabench.study.verdict import STATUS_WORDS

_STEPS, _WARMUP_STEPS = 4, 3  # the runs are compared by the sketches of their first steps
_FP32, _REFERENCE_KERNELS, _AS_IT_IS = "fp32", "reference-kernels", "as-it-is"
# without these, the trial's own values would contradict the precision fp32
_VARIANTS: dict[str, dict[str, Any]] = {
    _FP32: {"precision": "fp32", "grad_dtype": "fp32", "fp8_recipe": None},
    _REFERENCE_KERNELS: {"kernels": "reference"},
    _AS_IT_IS: {},
}


def locating_file(study: Study, name: str) -> StudyFile:
    """Return the study that runs the trial `name` and the reference for a few steps, in each of three ways.

    The ways are: in fp32; in the precision of the trial with the reference kernels; and in this precision with the
    trial's own kernels. A way that is impossible or equal to an earlier one is left out.

    Raises StudyError if `name` is not one trial, or if the trial is the reference.
    """
    trials = {trial.name: trial for trial in study.select([name], "--locate")}
    if len(trials) > 1:
        raise StudyError(f"--locate {name} matches {len(trials)} trials: {', '.join(trials)}; name one of them")
    (trial,) = trials.values()
    if trial.name == study.reference:
        raise StudyError(f"--locate {name} is the reference of the study; name the trial to compare with it")
    reference = next(other for other in study.trials if other.name == study.reference)
    entries: list[dict[str, Any]] = []
    for way, changes in _VARIANTS.items():
        pair = [_entry(one, trial, way, changes) for one in (reference, trial)]
        is_new = all(_without_name(entry) not in map(_without_name, entries) for entry in pair)
        if is_new and all(_is_valid(entry, trial) for entry in pair):
            entries += pair
    return StudyFile(
        name=f"{study.name}-locate-{trial.name}",
        question=f"Is the difference between {trial.name} and {reference.name} rounding?",
        answers="parity",
        trials=entries,
        reference=entries[0]["name"],
    )


def _entry(one: Trial, trial: Trial, way: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `one`, the trial or the reference, in this way of running both."""
    config, resolved = one.config, one.resolved
    found = {field: getattr(resolved, field) for field in config.auto_settings}
    settings = config.given() | found | {"steps": _STEPS, "warmup_steps": _WARMUP_STEPS, "profile": False}
    settings |= {"precision": trial.resolved.precision, "grad_dtype": trial.resolved.grad_dtype, **changes}
    plan = {"env": one.env, "world_size": one.world_size, "timeout_seconds": one.timeout_seconds}
    given = {field: value for field, value in (settings | plan).items() if value is not None}
    return given | {"name": f"{one.name}-{way}"}


def _without_name(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in entry.items() if field != "name"}


def _is_valid(entry: Mapping[str, Any], trial: Trial) -> bool:
    fields = {field: value for field, value in entry.items() if field not in ("name", "env", "timeout_seconds")}
    world_size = fields.pop("world_size")
    try:
        RunConfig.parse(fields).resolve(world_size, trial.resolved.device)
    except UserError:
        return False
    return True


def located(records: Sequence[RunRecord]) -> str:
    """Return the conclusion from the records of a study that `locating_file` returned."""
    bad = [record for record in records if record.status not in ("ok", "diverged")]
    if bad:
        return f"Not known: {bad[0].trial} {STATUS_WORDS[bad[0].status]}. Fewer layers may suffice: --set num_layers=N."
    different = {way: record for way in _VARIANTS for record in records if _is_of(way, record)}
    if record := different.get(_FP32):
        return f"This is not rounding, because the trial differs in fp32, too: {record.error}"
    equal = "In fp32, the tensors of the first steps are equal"
    if record := different.get(_REFERENCE_KERNELS):
        return f"{equal}. In {record.precision} with the reference kernels, {record.trial} differs: {record.error}"
    if record := different.get(_AS_IT_IS):
        return f"{equal}, also in {record.precision} with the reference kernels. So a kernel differs: {record.error}"
    return f"{equal}, and in the trial's own precision they differ by no more than rounding."


def _is_of(way: str, record: RunRecord) -> bool:
    return record.status == "diverged" and record.trial.endswith(f"-{way}")
