"""Diagnosis rules for trials without a valid result: report the failure and suggest a remedy.

A missing result makes no other figure wrong. Failed and hung trials leave the ranking incomplete, so their findings are
preliminary. Running out of memory is a result in itself, and its finding is a note.
"""

from collections.abc import Iterator

from megabench.doctor.finding import Case, Finding, is_on_gpu, variants
from megabench.record import RunRecord
from megabench.specs.registry import ENGINES_AND_PROGRAMS


def lost_reference(case: Case) -> Iterator[Finding]:
    """Report a study whose reference trial has no valid result, because speedups cannot be computed without one."""
    if len(case.by_trial) < 2 or case.reference_runs:
        return
    runs = case.by_trial.get(case.reference)
    ended = f"the reference trial ended with status {runs[0].status}" if runs else "the reference trial has no record"
    change = "fix the reference trial" if runs else "run the reference trial (megabench compare … --resume)"
    yield Finding(
        "preliminary",
        (),
        f"the reference {case.reference} has no valid result, so no trial can be compared with it",
        ended,
        f"{change}, or set another trial as `reference` in the study file",
    )


def diverged(case: Case) -> Iterator[Finding]:
    """Report trials whose losses, gradient norms or tensors differ from those of the reference."""
    for record in case.records:
        if record.status == "diverged":
            yield Finding(
                "untrustworthy",
                (record.trial,),
                "diverged: losses, gradient norms or tensors differ from the reference, so the speed is meaningless",
                record.error or "status diverged",
                "do not use the speed of this trial; check its losses, gradient norms, precision and settings first",
            )


def failed(case: Case) -> Iterator[Finding]:
    """Report trials that failed for any reason other than a hang."""
    for record in case.records:
        if record.status == "failed" and not _is_hang(record):
            error = record.error or "no reason was recorded"
            kind = record.failure.kind if record.failure else "error"
            cause = ""
            if kind == "shared-memory":
                cause = ": it ran out of shared memory"
                change = "increase the container's shared memory: --shm-size=1g, or an emptyDir with medium: Memory"
            elif kind == "killed":
                cause = ": a process was killed"
                change = "check dmesg for the out-of-memory killer; add host memory, or offload less state"
            else:
                change = f"read {_log(_rank(record))}"
            yield Finding("preliminary", (record.trial,), f"the trial failed and has no result{cause}", error, change)


def hung(case: Case) -> Iterator[Finding]:
    """Report trials that hung: no rank made progress, or the trial exceeded its time limit."""
    for record in case.records:
        if _is_hang(record):
            error = record.error or "no result within timeout_seconds"
            rank = _rank(record)
            who = "an unidentified rank" if rank is None else f"rank {rank}"
            yield Finding(
                "preliminary",
                (record.trial,),
                f"the trial hung or exceeded the time limit, perhaps because the other ranks waited for {who}",
                error,
                f"read {_log(rank)}; increase timeout_seconds if the trial was still making progress",
            )


def out_of_memory(case: Case) -> Iterator[Finding]:
    """Report trials that ran out of memory, unless a sweep of the study shows how much fits."""
    for record in case.records:
        if record.status == "oom" and not any(_needs_less(other, record) for other in variants(case, record)):
            error = record.error or "status oom"
            yield Finding(
                "note",
                (record.trial,),
                "the trial ran out of memory and has no result",
                error.partition(" Including non-PyTorch memory")[0],  # PyTorch's advice about its allocator follows
                less_memory(record),
            )


def _needs_less(other: RunRecord, record: RunRecord) -> bool:
    """Return whether a variant of `record` has a result with a smaller micro-batch or in another precision."""
    is_other = other.micro_batch < record.micro_batch or other.precision != record.precision
    return other.status == "ok" and is_other and other.micro_batch <= record.micro_batch


def _is_hang(record: RunRecord) -> bool:
    return record.status == "timeout" or (record.failure is not None and record.failure.kind == "hang")


def _rank(record: RunRecord) -> int | None:
    return record.failure.rank if record.failure else None


def _log(rank: int | None) -> str:
    return f"logs/TRIAL/rank-{'*' if rank is None else rank}.log in the study's run directory"


def less_memory(record: RunRecord) -> str:
    """Suggest ways to reduce memory use, ordered from the cheapest to the most expensive."""
    options, ways = record.options, []
    if record.micro_batch > 1:
        ways.append(f"micro_batch below {record.micro_batch} (micro_batch: auto finds one that fits)")
    if options.get("recompute", "none") != "full" and "recompute" not in record.auto_settings:
        ways.append("recompute: full (recompute: auto tries less recomputation first)")
    spec = ENGINES_AND_PROGRAMS.get(record.engine)
    ways.append(spec.less_memory(options) if spec and record.world_size > 1 else "more GPUs")
    if not is_on_gpu(record):
        ways.append("run fewer processes on this machine")
    return ", or ".join(ways)
