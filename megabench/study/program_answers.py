"""Say how fast programs are beside the fastest layout, and what they do differently. Does not import torch."""

from collections.abc import Iterator, Sequence
from typing import Any

from megabench.record import KernelTraits, RunRecord
from megabench.specs.registry import PROGRAMS
from megabench.study.summary import Row, runs_by_trial
from megabench.study.verdict import listed

_OPERATIONS = {"fused_norm": "norms", "fused_activation": "activations", "fused_loss": "loss"}
_OFFLOADED = {"offload_optimizer": "the optimizer state", "offload_param": "the weights"}


def program_sentences(good: Sequence[Row], records: Sequence[RunRecord]) -> Iterator[str]:
    """Say the speed of each program relative to the fastest trial of its work class, in one sentence each.

    The differences are those of the settings and of the recorded kernels. `good` are the trials with a result.
    """
    first = {trial: runs[0] for trial, runs in runs_by_trial(records).items()}
    for row in good:
        record = first[row.trial]
        if record.engine not in PROGRAMS:
            continue
        alike = [other for other in good if other.work_class == row.work_class]
        best = max(alike, key=lambda other: other.speed)
        spec = PROGRAMS[record.engine]
        name = f"{spec.title} with {spec.mode(record.options)} ({row.trial})"
        if len(alike) == 1:
            continue
        if best is row:
            yield f"{name} is the fastest trial."
            continue
        said = f"{name} trains {row.speed / best.speed:.2f} × as fast as {best.trial}"
        differences = list(_differences(record, first[best.trial]))
        yield f"{said}; what it does differently: {listed(differences)}." if differences else f"{said}."


def _differences(record: RunRecord, best: RunRecord) -> Iterator[str]:
    """Yield what a program does differently than the fastest trial and costs time."""
    mine, others = record.kernel_traits or KernelTraits(), best.kernel_traits or KernelTraits()
    plain = [word for trait, word in _OPERATIONS.items() if getattr(others, trait) and getattr(mine, trait) is False]
    if plain:
        yield f"unfused kernels of {listed(plain)}"
    if offloaded := _offloaded(record.options):
        yield f"{listed(offloaded)} in host memory"
    if record.options.get("recompute", "none") != "none" and best.options.get("recompute", "none") == "none":
        yield "recomputation of all layers"
    if record.micro_batch < best.micro_batch:
        yield f"micro-batches of {record.micro_batch} instead of {best.micro_batch}"
    if _finds_unused_parameters(record):
        yield "a search for unused parameters in every step (ddp_find_unused_parameters)"
    if str(record.layout) != str(best.layout):
        yield "another layout"


def _finds_unused_parameters(record: RunRecord) -> bool:
    """Return whether DDP searches for unused parameters: transformers' default without recomputation."""
    given = (record.options.get("trainer_args") or {}).get("ddp_find_unused_parameters")
    is_default = record.options.get("recompute", "none") == "none"
    return PROGRAMS[record.engine].mode(record.options) == "DDP" and (is_default if given is None else bool(given))


def _offloaded(options: dict[str, Any]) -> list[str]:
    zero = (options.get("deepspeed_config") or {}).get("zero_optimization", {})
    return [word for key, word in _OFFLOADED.items() if (zero.get(key) or {}).get("device", "none") != "none"]
