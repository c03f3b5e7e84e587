"""Names of the reference and of the work classes of a study."""

from collections.abc import Sequence
from typing import Any

from megabench.record import RunRecord, WorkClass
from megabench.study.parity import is_zero3


def reference_name(records: Sequence[RunRecord], reference: str) -> str:
    """Return the name of the reference in the header of a table, which is "ZeRO-3" or the name of the trial."""
    return "ZeRO-3" if any(record.trial == reference and is_zero3(record) for record in records) else reference


def class_titles(records: Sequence[RunRecord]) -> dict[str | None, str]:
    """Return a title for each work class: the work, and its difference from the other classes."""
    classes = {record.work_class.id: record for record in records if record.work_class}
    settings = {name: _settings(record.work_class) for name, record in classes.items() if record.work_class}
    shared = set.intersection(*map(set, settings.values())) if settings else set()
    titles: dict[str | None, str] = {}
    for name, record in classes.items():
        what = f"{record.model}, {record.precision}, {record.global_batch} × {record.seq_length} tokens a step"
        mine = settings[name]
        differing = [
            f"{field}={value}"
            for field, value in mine.items()
            if field in shared and any(other[field] != value for other in settings.values()) and value is not None
        ]
        titles[name] = ", ".join([what, f"{record.world_size} × {record.device}", *differing])
    return titles


def _settings(work_class: WorkClass) -> dict[str, Any]:
    """Return the properties of a work class that not every title contains, with the schedule's settings included."""
    in_every_title = {"model", "precision", "global_batch", "seq_length"}
    settings = work_class.model_dump(exclude={"schedule", "data", "fp8", *in_every_title})
    fp8 = work_class.fp8
    return (
        settings
        | {field: value if isinstance(value, str) else f"{value:g}" for field, value in work_class.rules.items()}
        | {
            "fp8_recipe": fp8.recipe if fp8 else None,
            "num_layers_at_start_in_bf16": fp8.num_layers_at_start_in_bf16 if fp8 else 0,
            "num_layers_at_end_in_bf16": fp8.num_layers_at_end_in_bf16 if fp8 else 0,
        }
    )
