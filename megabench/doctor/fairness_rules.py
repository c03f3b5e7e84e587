"""Diagnosis rules for fair comparison: equal work, equal kernels, and a well-tuned baseline.

A sweep measures one engine with one layout and equal options in several precisions or with several micro-batches. It is
deliberate, and its trials make no comparison unfair.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from megabench.doctor.finding import AS_FAST, Case, Finding, Kind, is_on_gpu, is_swept, names, variants, was_tuned
from megabench.record import KernelTraits, RunRecord, WorkClass
from megabench.study.bf16_reference import bf16_reference, classes_compared_with_bf16, has_fp8
from megabench.study.parity import is_zero3
from megabench.study.summary import speeds_of

# Above this fraction of used GPU memory, a larger micro-batch may run out of memory.
_FULL = 0.9


def precision(case: Case) -> Iterator[Finding]:
    """Report trials that train in different precisions. fp8 trials are compared with bf16 trials on purpose."""
    others = Case(tuple(record for record in case.records if not has_fp8(record)), case.reference)
    yield from _unequal(others, "precision", lambda record: record.precision)


def fp8_without_bf16(case: Case) -> Iterator[Finding]:
    """Report fp8 trials without a bf16 trial of otherwise equal work, so that their losses cannot be judged.

    The finding is preliminary: the speeds are right, but a trial is missing.
    """
    for record in case.good:
        if has_fp8(record) and bf16_reference(record, case.records) is None:
            yield Finding(
                "preliminary",
                (record.trial,),
                "the trial trains in fp8, and the study has no bf16 result of otherwise equal work, so it is unknown "
                "what fp8 costs in loss",
                "parity compares fp8 trials only with each other",
                "add a trial with precision: bf16 and otherwise equal settings",
            )


def gradient_dtype(case: Case) -> Iterator[Finding]:
    """Report trials that reduce gradients in different dtypes, because their communication volumes differ."""
    yield from _unequal(case, "gradient dtype", lambda record: record.grad_dtype, "grad_dtype")


def _unequal(case: Case, what: str, value: Callable[[RunRecord], str], setting: str | None = None) -> Iterator[Finding]:
    """Report a setting that differs between trials, unless the study varies the setting on purpose.

    It does so if every trial with another value than the reference belongs to a sweep with the reference's value, or if
    each value has its own ZeRO-3 baseline.
    """
    trials_of: dict[str, list[str]] = {}
    for trial, runs in case.by_trial.items():
        trials_of.setdefault(value(runs[0]), []).append(trial)
    measured = {value(record) for record in case.records if is_zero3(record)}
    if trials_of.keys() <= measured:
        return
    expected = value(case.by_trial.get(case.reference, case.records)[0])
    if any(all(value(run) != expected for run in (record, *variants(case, record))) for record in case.records):
        yield Finding(
            "untrustworthy",
            (),
            f"the trials differ in {what}, so their speeds are not comparable",
            "; ".join(f"{word}: {names(trials)}" for word, trials in trials_of.items()),
            f"set the same {setting or what} for all trials, under `base` in the study file",
        )


def other_work(case: Case) -> Iterator[Finding]:
    """Report trials that belong to a different work class than the reference and therefore have no speedup."""
    expected = next((record.work_class for record in case.reference_runs if record.work_class), None)
    if expected is None:
        return
    measured = {record.work_class.id for record in case.good if record.work_class and is_zero3(record)}
    measured |= classes_compared_with_bf16(case.records).keys()  # the fp8 trials and their bf16 references
    mine = _fields(expected)
    for record in case.good:
        if record.work_class is None or record.work_class.optimizer != expected.optimizer:
            continue  # a study changes the optimizer or the gradient compression on purpose
        if record.work_class.id in measured:
            continue  # this work class is compared with another baseline
        theirs = _fields(record.work_class)
        differing = [
            f"{name} {_text(theirs[name])} instead of {_text(value)}"
            for name, value in mine.items()
            if name in theirs and theirs[name] != value
        ]
        if differing:
            yield Finding(
                "note",
                (record.trial,),
                f"the trial and the reference {case.reference} train different workloads and are not compared",
                ", ".join(differing),
                "use the same settings for both trials if you want to compare them",
            )


def _fields(work: WorkClass) -> dict[str, Any]:
    """Return the work class fields that must be equal, including the settings of the schedule and of fp8."""
    fields = work.model_dump(exclude={"data", "precision", "grad_dtype", "optimizer", "compression"})
    fp8 = fields.pop("fp8")
    return fields | work.rules | (fp8 or {})


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def kernels(case: Case) -> Iterator[Finding]:
    """Report work classes in which some trials run fused kernels and other trials run unfused kernels."""
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
                    "the trial runs plain (unfused) kernels where other trials run fused kernels"
                    + (" (kernels: reference)" if is_meant else ", so the trials differ in more than the layout"),
                    ", ".join(f"{operation}: {(record.kernels or {}).get(operation)}" for operation in unequal),
                    "compare this trial only with other trials that set kernels: reference"
                    if is_meant
                    else "set kernels: auto for all trials, and install liger-kernel",
                )


def _plain_operations(record: RunRecord) -> list[str]:
    """Return the operations that ran with an unfused kernel, although every engine has a fused kernel for them."""
    traits = record.kernel_traits or KernelTraits()
    is_fused = {
        "attention": traits.flash_attention,
        "norm": traits.fused_norm,
        "activation": traits.fused_activation,
        "cross_entropy": traits.fused_loss,
    }
    return [operation for operation, fused in is_fused.items() if fused is False]


def weaker_reference(case: Case) -> Iterator[Finding]:
    """Report the fastest ZeRO-3 trial if it is faster than the ZeRO-3 reference of the study.

    The finding is only a note if the faster trials belong to the same sweep as the reference. A study file can name
    only one trial of a sweep as the reference, and the table shows the other trials of the sweep, too.
    """
    mine = _speed(case.reference_runs)
    if mine is None or not is_zero3(case.reference_runs[0]) or not case.reference_runs[0].work_class:
        return
    reference = case.reference_runs[0]
    swept = {record.trial for record in variants(case, reference)}
    faster = {
        trial: speed
        for trial, runs in case.good_by_trial.items()
        if is_zero3(runs[0])
        and _is_comparable(runs[0], reference)
        and (speed := _speed(runs))
        and speed > mine * (1 + AS_FAST)
    }
    if not faster:
        return
    trial = max(faster, key=faster.__getitem__)
    kind: Kind = "note" if faster.keys() <= swept else "untrustworthy"
    yield Finding(
        kind,
        (),
        f"the reference {case.reference} is not the fastest ZeRO-3 trial, so all speedups are too high",
        f"{trial} reaches {faster[trial]:,.0f} tok/s per device, and {case.reference} {mine:,.0f} tok/s per device",
        f"reference: {trial}",
    )


def _is_comparable(record: RunRecord, other: RunRecord) -> bool:
    """Return whether two runs did equal work on the same hosts and network. All planned runs count as equal work."""
    return _work_and_place(record) == _work_and_place(other)


def _work_and_place(record: RunRecord) -> tuple[object, ...]:
    network, work = record.emulated_network, record.work_class
    limit = (network.gb_per_s, network.latency_us) if network else None
    return work and work.id, record.num_hosts, record.emulated_hosts, limit


def untuned_reference(case: Case) -> Iterator[Finding]:
    """Report a baseline with one fixed micro-batch while comparable trials were tuned or have a larger one.

    A trial is tuned with `micro_batch: auto`, or by a sweep that includes a larger micro-batch than the reference's. If
    the study sweeps the micro-batch of the reference, its trials show the effect, and nothing is reported.
    """
    if not case.reference_runs or not is_on_gpu(case.reference_runs[0]):
        return
    reference = case.reference_runs[0]
    if was_tuned(reference) or is_swept(case, reference) or not _may_grow(reference):
        return
    others = [record for record in case.on_gpus if record.trial != case.reference and _is_comparable(record, reference)]
    larger = [record for record in others if _sequences_per_gpu(record) > _sequences_per_gpu(reference)]
    tuned = [record for record in others if was_tuned(record)] + [record for record in larger if is_swept(case, record)]
    better = tuned or (larger if reference.micro_batch == 1 else [])
    if better:
        how = "tuned" if tuned else "larger"
        yield Finding(
            "untrustworthy",
            (),
            f"the reference {case.reference} has a fixed micro-batch of {reference.micro_batch} while other trials "
            f"have a {how} one, so all speedups are too high",
            f"{names(list(dict.fromkeys(record.trial for record in better)))}: {how} micro-batch",
            "set micro_batch: auto for all trials, under `base` in the study file",
        )


def _sequences_per_gpu(record: RunRecord) -> float:
    """Return the micro-batch size per GPU: tensor and context parallelism divide a micro-batch's activations."""
    return record.micro_batch / (record.layout.tp * record.layout.cp)


def gathers_by_parts(case: Case) -> Iterator[Finding]:
    """Report a GPU study in which every ZeRO-3 trial gathers weights by submodule instead of by layer.

    Whole-layer all-gathers are faster when the host code limits the speed.
    """
    shards = [record for record in case.on_gpus if is_zero3(record) and record.world_size > 1]
    if shards and not any(record.options.get("zero_leaf_layers") for record in shards):
        yield Finding(
            "note",
            tuple(dict.fromkeys(record.trial for record in shards)),
            "ZeRO-3 gathers submodules one by one, which is DeepSpeed's default; no ZeRO-3 trial gathers whole layers",
            "DeepSpeed's host code waits for an all-gather every few submodules; with whole layers, two H200 "
            "GPUs that had been idle 5% of the time trained 7% faster",
            "add a trial with zero_leaf_layers: true, zero_prefetch: 500000000, zero_persistence: 1000000",
        )


def gathers_twice(case: Case) -> Iterator[Finding]:
    """Report a multi-host GPU study whose ZeRO-3 trials all gather the weights again for the backward pass."""
    across = [record for record in case.on_gpus if is_zero3(record) and (record.num_hosts or 1) > 1]
    if across and all(record.options.get("reshard_after_forward", True) for record in across):
        yield Finding(
            "note",
            tuple(dict.fromkeys(record.trial for record in across)),
            "ZeRO-3 gathers the weights across hosts for forward and again for backward; no ZeRO-3 trial keeps them",
            "keeping the gathered weights until backward saves a quarter to a third of the communicated bytes but "
            "needs memory for all 16-bit weights",
            "add a trial with reshard_after_forward: false if the GPU memory is large enough",
        )


def losses_that_stand_still(case: Case) -> Iterator[Finding]:
    """Report losses that vary by less than the parity tolerance.

    Such losses would also match those of an engine that never updates the weights.
    """
    for record in case.reference_runs:
        losses = [loss for loss in record.losses or () if loss is not None]
        if len(losses) < 2 or record.parity is None:
            continue
        moved = (max(losses) - min(losses)) / abs(statistics.mean(losses))
        if moved < record.parity.tolerance:
            yield Finding(
                "note",
                (record.trial,),
                "the losses hardly change, so equal losses verify forward and backward, but not the weight updates",
                f"the losses vary by {moved:.2g} of their mean; the parity tolerance is {record.parity.tolerance:g}",
                "set data: stdlib, or train more steps at a higher learning rate",
            )
            return


def _may_grow(record: RunRecord) -> bool:
    """Return whether a larger micro-batch is valid and may fit in memory."""
    is_legal = record.micro_batch * record.layout.dp < record.global_batch
    peak, all_of_it = record.peak_memory_gib, record.device_memory_gib
    is_full = peak is not None and all_of_it is not None and peak.max > _FULL * all_of_it
    return is_legal and not is_full


def skipped_steps(case: Case) -> Iterator[Finding]:
    """Report timed steps in which the optimizer did not update the weights."""
    for record in case.good:
        timed = record.grad_norms[record.warmup_steps :]
        num_skipped = min(record.num_skipped_steps, sum(norm is None for norm in timed))
        if num_skipped:
            yield Finding(
                "untrustworthy",
                (record.trial,),
                "skipped timed steps: the gradients were not finite, and the optimizer did not update the weights",
                f"{num_skipped} of {len(timed)} timed steps skipped the weight update",
                "increase warmup_steps until the loss scale is stable, or set precision: bf16",
            )


def reference_is_not_zero3(case: Case) -> Iterator[Finding]:
    """Report a reference trial that does not use ZeRO-3: its speedups do not compare layouts with ZeRO-3."""
    runs = case.by_trial.get(case.reference)
    if runs and len(case.by_trial) > 1 and not is_zero3(runs[0]):
        yield Finding(
            "note",
            (),
            f"the reference {case.reference} is not ZeRO-3, so the speedups do not compare layouts with ZeRO-3",
            f"the engine of the reference is {runs[0].engine}",
            "to compare with ZeRO-3, set a trial {engine: deepspeed, zero_stage: 3} as the reference",
        )


def _speed(runs: list[RunRecord]) -> float | None:
    speeds = speeds_of(runs)
    return statistics.median(speeds) if speeds else None
