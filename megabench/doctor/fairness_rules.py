"""Whether the trials can be compared: the same work, the same kernels, and a baseline at its best."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from megabench.doctor.finding import Case, Finding, is_on_gpu, is_tried_larger, names, was_tuned
from megabench.record import KernelTraits, RunRecord, WorkClass
from megabench.study.parity import is_zero3
from megabench.study.summary import speeds_of

# within this the reference is as good as the other ZeRO-3 trial: the runs of one trial differ as much
AS_FAST = 0.02

# beyond this part of its memory a GPU may not hold a larger micro-batch
_FULL = 0.9


def precision(case: Case) -> Iterator[Finding]:
    """Trials that train in different precisions."""
    yield from _unequal(case, "precision", lambda record: record.precision)


def gradient_dtype(case: Case) -> Iterator[Finding]:
    """Trials that reduce gradients in different dtypes: unequal bytes on the wire."""
    yield from _unequal(case, "gradient dtype", lambda record: record.grad_dtype, "grad_dtype")


def _unequal(case: Case, what: str, value: Callable[[RunRecord], str], setting: str | None = None) -> Iterator[Finding]:
    """A setting that is not the same for all trials, which should be."""
    trials_of: dict[str, list[str]] = {}
    for trial, runs in case.by_trial.items():
        trials_of.setdefault(value(runs[0]), []).append(trial)
    measured = {value(record) for record in case.records if is_zero3(record)}  # a class may have a baseline of its own
    twins = [{_else(case.by_trial[trial][0]) for trial in trials} for trials in trials_of.values()]
    is_meant = trials_of.keys() <= measured or all(others == twins[0] for others in twins)
    if len(trials_of) > 1 and not is_meant:
        yield Finding(
            "untrustworthy",
            (),
            f"the trials differ in {what}, so their speeds do not compare",
            "; ".join(f"{word}: {names(trials)}" for word, trials in trials_of.items()),
            f"one {setting or what} in base, for all trials",
        )


def _else(record: RunRecord) -> str:
    """All that a trial has beside precision and gradient dtype: with equal texts, the study varies these on purpose."""
    return repr((record.engine, record.layout, record.options, record.optimizer, record.micro_batch))


def other_work(case: Case) -> Iterator[Finding]:
    """Trials in another work class than the reference, which have no ratio."""
    expected = next((record.work_class for record in case.reference_runs if record.work_class), None)
    if expected is None:
        return
    measured = {record.work_class.id for record in case.good if record.work_class and is_zero3(record)}
    mine = _fields(expected)
    for record in case.good:
        if record.work_class is None or record.work_class.optimizer != expected.optimizer:
            continue  # another optimizer is another work on purpose, and so is compression
        if record.work_class.id in measured:
            continue  # by a ZeRO-3 trial of its own
        theirs = _fields(record.work_class)
        differing = [
            f"{name} {_text(theirs.get(name))} instead of {_text(value)}"
            for name, value in mine.items()
            if theirs.get(name) != value
        ]
        if differing:
            yield Finding(
                "note",
                (record.trial,),
                f"does other work than the reference {case.reference}, so the two are not compared",
                ", ".join(differing),
                "the same settings for both, if they are meant to be compared",
            )


def _fields(work: WorkClass) -> dict[str, Any]:
    """The fields of a work class that should be equal, those of its schedule among them."""
    fields = work.model_dump(exclude={"data", "precision", "grad_dtype", "optimizer", "compression"})
    return fields | fields.pop("schedule")


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def kernels(case: Case) -> Iterator[Finding]:
    """Fused kernels in some trials of a work class and plain ones in others."""
    classes: dict[str, dict[str, RunRecord]] = {}
    for record in case.on_gpus:
        if record.kernel_traits and record.work_class:
            classes.setdefault(record.work_class.id, {})[record.trial] = record
    for trials in classes.values():
        plain = {trial: _plain_operations(record) for trial, record in trials.items()}
        everywhere = set.intersection(*(set(operations) for operations in plain.values()))
        for trial, operations in plain.items():
            if unequal := [operation for operation in operations if operation not in everywhere]:
                record, is_meant = trials[trial], trials[trial].requested_kernels == "reference"
                yield Finding(
                    "note" if is_meant else "untrustworthy",
                    (trial,),
                    "runs plain kernels where other trials run fused ones"
                    + (" (kernels: reference)" if is_meant else ", so layout is not all that differs"),
                    ", ".join(f"{operation}: {(record.kernels or {}).get(operation)}" for operation in unequal),
                    "compare it with others of kernels: reference only"
                    if is_meant
                    else "kernels: auto for all, and liger-kernel installed",
                )


def _plain_operations(record: RunRecord) -> list[str]:
    """Operations that have a fused kernel on every engine, and a plain one here."""
    traits = record.kernel_traits or KernelTraits()
    is_fused = {
        "attention": traits.flash_attention,
        "norm": traits.fused_norm,
        "activation": traits.fused_activation,
        "cross_entropy": traits.fused_loss,
    }
    return [operation for operation, fused in is_fused.items() if fused is False]


def weaker_reference(case: Case) -> Iterator[Finding]:
    """A ZeRO-3 trial that is faster than the ZeRO-3 trial all others are measured by."""
    mine = _speed(case.reference_runs)
    if mine is None or not is_zero3(case.reference_runs[0]) or not case.reference_runs[0].work_class:
        return
    for trial, runs in case.good_by_trial.items():
        theirs, work = _speed(runs), runs[0].work_class
        same = work is not None and work.id == case.reference_runs[0].work_class.id
        if theirs and same and trial != case.reference and is_zero3(runs[0]) and theirs > mine * (1 + AS_FAST):
            yield Finding(
                "untrustworthy",
                (),
                f"the reference {case.reference} is not the fastest ZeRO-3 of the study, so every ratio flatters",
                f"{trial} reaches {theirs:,.0f} tok/s per device, {case.reference} {mine:,.0f}",
                f"reference: {trial}",
            )


def untuned_reference(case: Case) -> Iterator[Finding]:
    """A baseline that is held at a small micro-batch while others got theirs by trying, or a larger one."""
    if not case.reference_runs or not is_on_gpu(case.reference_runs[0]):
        return
    reference = case.reference_runs[0]
    others = [record for record in case.good if record.trial != case.reference and is_on_gpu(record)]
    tuned = [record.trial for record in others if was_tuned(record)]
    larger = [record.trial for record in others if record.micro_batch > reference.micro_batch]
    better = tuned or (larger if reference.micro_batch == 1 else [])
    if better and not was_tuned(reference) and _may_grow(case, reference):
        how = "found by trying" if tuned else "a larger one"
        yield Finding(
            "untrustworthy",
            (),
            f"the reference {case.reference} is held at micro-batch {reference.micro_batch} while others are tuned, "
            "so every ratio flatters",
            f"{names(list(dict.fromkeys(better)))}: {how}",
            "micro_batch: auto in base, for all trials",
        )


def gathers_by_parts(case: Case) -> Iterator[Finding]:
    """A study on GPUs in which no ZeRO-3 gathers whole layers, which is faster where the host holds it back."""
    shards = [record for record in case.on_gpus if is_zero3(record) and record.world_size > 1]
    if shards and not any(record.options.get("zero_leaf_layers") for record in shards):
        yield Finding(
            "note",
            tuple(dict.fromkeys(record.trial for record in shards)),
            "gathers layers by their parts, as DeepSpeed does by default, and no other ZeRO-3 trial gathers them whole",
            "DeepSpeed's host code waits for gathers every few parts; two H200s that were idle for 5% got 7% faster",
            "a trial with zero_leaf_layers: true, zero_prefetch: 500000000, zero_persistence: 1000000",
        )


def gathers_twice(case: Case) -> Iterator[Finding]:
    """A study on GPUs of several hosts in which no ZeRO-3 keeps what it gathered for the backward pass."""
    across = [record for record in case.on_gpus if is_zero3(record) and (record.num_hosts or 1) > 1]
    if across and all(record.options.get("reshard_after_forward", True) for record in across):
        yield Finding(
            "note",
            tuple(dict.fromkeys(record.trial for record in across)),
            "gathers its weights across hosts for forward and for backward, and no other ZeRO-3 trial keeps them",
            "kept from forward to backward, for the memory of all 16-bit weights, they are a quarter to a third of the "
            "bytes less",
            "a trial with reshard_after_forward: false, where the memory suffices",
        )


def losses_that_stand_still(case: Case) -> Iterator[Finding]:
    """Losses that vary by less than parity tolerates: they would agree with those of an engine that updates nothing."""
    for record in case.reference_runs:
        losses = [loss for loss in record.losses or () if loss is not None]
        if len(losses) < 2 or record.parity is None:
            continue
        moved = (max(losses) - min(losses)) / abs(statistics.mean(losses))
        if moved < record.parity.tolerance:
            yield Finding(
                "note",
                (record.trial,),
                "has losses that hardly move, so that equal ones prove the forward pass and gradients, not updates",
                f"they vary by {moved:.2g} of their value, and parity tolerates {record.parity.tolerance:g}",
                "data: stdlib, or more steps at a higher learning rate",
            )
            return


def _may_grow(case: Case, record: RunRecord) -> bool:
    """Whether a larger micro-batch is legal and may fit, and no other trial shows what it would do."""
    is_legal = record.micro_batch * record.layout.dp < record.global_batch
    peak, all_of_it = record.peak_memory_gib, record.device_memory_gib
    is_full = peak is not None and all_of_it is not None and peak.max > _FULL * all_of_it
    return is_legal and not is_full and not is_tried_larger(case, record)


def skipped_steps(case: Case) -> Iterator[Finding]:
    """Timed steps without an update of the weights."""
    for record in case.good:
        timed = record.grad_norms[record.warmup_steps :]
        num_skipped = min(record.num_skipped_steps, sum(norm is None for norm in timed))
        if num_skipped:
            yield Finding(
                "untrustworthy",
                (record.trial,),
                "skipped timed steps: their gradients were not finite, and the optimizer did not run",
                f"{num_skipped} of {len(timed)} timed steps",
                "more warmup_steps until the loss scale has settled, or precision: bf16",
            )


def reference_is_not_zero3(case: Case) -> Iterator[Finding]:
    """Ratios that say nothing about ZeRO-3."""
    runs = case.by_trial.get(case.reference)
    if runs and len(case.by_trial) > 1 and not is_zero3(runs[0]):
        yield Finding(
            "note",
            (),
            f"the reference {case.reference} is not ZeRO-3, so the ratios say nothing about ZeRO-3",
            f"its engine is {runs[0].engine}",
            "add a trial {engine: deepspeed, zero_stage: 3} and name it as reference, if that is the question",
        )


def _speed(runs: list[RunRecord]) -> float | None:
    speeds = speeds_of(runs)
    return statistics.median(speeds) if speeds else None
