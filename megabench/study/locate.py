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
# a setting that is None is left out, because the trial's own value would contradict the precision fp32
_VARIANTS: dict[str, dict[str, Any]] = {
    _FP32: {
        "precision": "fp32",
        "grad_dtype": "fp32",
        "fp8_recipe": None,
        "num_layers_at_start_in_bf16": None,
        "num_layers_at_end_in_bf16": None,
    },
    _REFERENCE_KERNELS: {"kernels": "reference"},
    _AS_IT_IS: {},
}

_PLACES = {
    _FP32: "in fp32",
    _REFERENCE_KERNELS: "with the reference kernels",
    _AS_IT_IS: "with the trial's own kernels",
}
_CAUSES = {_FP32: ", so this is not rounding", _REFERENCE_KERNELS: "", _AS_IT_IS: ", so a kernel is the cause"}


def locating_file(study: Study, name: str) -> StudyFile:
    """Return the study that runs the trial `name` and the reference for a few steps, in up to three variants.

    The variants are: in fp32; in the precision of the trial with the reference kernels; and in this precision with the
    trial's own kernels. A variant that is impossible or equal to an earlier one is left out.

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
    for variant, changes in _VARIANTS.items():
        pair = [_entry(source, trial, variant, changes) for source in (reference, trial)]
        is_new = all(_without_name(entry) not in map(_without_name, entries) for entry in pair)
        if is_new and all(_is_valid(entry, trial) for entry in pair):
            entries += pair
    if not entries:
        raise StudyError(
            f"--locate {name}: the settings of {trial.name} and {reference.name} allow no run of {_STEPS} steps; use a "
            f"trial without settings that depend on the number of steps"
        )
    return StudyFile(
        name=f"{study.name}-locate-{trial.name}",
        question=f"Is the difference between {trial.name} and {reference.name} rounding?",
        answers="parity",
        trials=entries,
        reference=entries[0]["name"],
    )


def _entry(source: Trial, trial: Trial, variant: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run in this variant. `source` is the reference or the trial to locate, `trial`."""
    config, resolved = source.config, source.resolved
    found = {field: getattr(resolved, field) for field in config.auto_settings}
    settings = config.given() | found | {"steps": _STEPS, "warmup_steps": _WARMUP_STEPS, "profile": False}
    settings |= {"schedule": None, "decay_steps": None}  # a decay may need more steps
    settings |= {"precision": trial.resolved.precision, "grad_dtype": trial.resolved.grad_dtype, **changes}
    plan = {"env": source.env, "world_size": source.world_size, "timeout_seconds": source.timeout_seconds}
    given = {field: value for field, value in (settings | plan).items() if value is not None}
    return given | {"name": f"{source.name}-{variant}"}


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
    if bad := [record for record in records if record.status not in ("ok", "diverged")]:
        return f"Not known: {bad[0].trial} {STATUS_WORDS[bad[0].status]}. Fewer layers may suffice: --set num_layers=N."
    compared = [record for record in records if record.parity and record.parity.tensors]
    equal: list[str] = []
    for variant, place in _PLACES.items():
        of_variant = [record for record in compared if record.trial.endswith(f"-{variant}")]
        if different := [record for record in of_variant if record.status == "diverged"]:
            before = f"The tensors of the first steps are equal {' and '.join(equal)}. " if equal else ""
            cause = _CAUSES[variant] if equal or variant == _FP32 else ""
            return f"{before}{place.capitalize()}, {different[0].trial} differs{cause}: {different[0].error}"
        equal += [place] if of_variant else []
    if not equal:
        return "Not known: the runs wrote no sketches of their tensors."
    return f"This is rounding: the tensors of the first steps are equal {' and '.join(equal)}."
