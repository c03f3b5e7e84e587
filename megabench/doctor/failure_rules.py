"""Trials that ended without a good result: what happened, and what to try."""

from collections.abc import Iterator

from megabench.doctor.finding import Case, Finding, is_on_gpu
from megabench.record import RunRecord
from megabench.specs.registry import ENGINES


def lost_reference(case: Case) -> Iterator[Finding]:
    """A study whose ratios have nothing to go by."""
    if len(case.by_trial) < 2 or case.reference_runs:
        return
    runs = case.by_trial.get(case.reference)
    ended = f"it ended as {runs[0].status}" if runs else "there is no record of it"
    change = "repair it, or name another trial" if runs else "run it (megabench compare … --resume), or name another"
    yield Finding(
        "untrustworthy",
        (),
        f"the reference {case.reference} has no good result, so nothing is compared with it",
        ended,
        f"{change} as reference in the study",
    )


def diverged(case: Case) -> Iterator[Finding]:
    """Trials that did other work than the reference."""
    for record in case.records:
        if record.status == "diverged":
            yield Finding(
                "untrustworthy",
                (record.trial,),
                "diverged: its losses or gradients are not those of the same work, so its speed means nothing",
                record.error or "status diverged",
                "do not use its speed; look at its losses, gradient norms, precision and settings first",
            )


def failed(case: Case) -> Iterator[Finding]:
    """Trials that broke off, but for those that stood still."""
    for record in case.records:
        if record.status == "failed" and not _is_hang(record):
            error = record.error or "no reason was recorded"
            kind = record.failure.kind if record.failure else "error"
            if kind == "shared-memory":
                change = "give the container more shared memory: --shm-size=1g or more, or an emptyDir of medium Memory"
            elif kind == "killed":
                change = "look at dmesg for the out-of-memory killer; more host memory, or less offload"
            else:
                change = f"read {_log(_rank(record))}"
            yield Finding("untrustworthy", (record.trial,), "failed and has no result", error, change)


def hung(case: Case) -> Iterator[Finding]:
    """Trials in which no rank got on, or that came to no end."""
    for record in case.records:
        if _is_hang(record):
            error = record.error or "no result within timeout_seconds"
            rank = _rank(record)
            who = "one of them" if rank is None else f"rank {rank}"
            yield Finding(
                "untrustworthy",
                (record.trial,),
                f"hung, or was too slow for its time limit: the others may wait for {who}",
                error,
                f"read {_log(rank)}; a larger timeout_seconds if its steps went on",
            )


def out_of_memory(case: Case) -> Iterator[Finding]:
    """Trials that need more memory than there is."""
    for record in case.records:
        if record.status == "oom":
            yield Finding(
                "untrustworthy",
                (record.trial,),
                "ran out of memory and has no result",
                record.error or "status oom",
                _less_memory(record),
            )


def _is_hang(record: RunRecord) -> bool:
    return record.status == "timeout" or (record.failure is not None and record.failure.kind == "hang")


def _rank(record: RunRecord) -> int | None:
    return record.failure.rank if record.failure else None


def _log(rank: int | None) -> str:
    return f"logs/TRIAL/rank-{'*' if rank is None else rank}.log in the study's folder"


def _less_memory(record: RunRecord) -> str:
    """What would take less, the cheapest first."""
    options, ways = record.options, []
    if record.micro_batch > 1:
        ways.append(f"micro_batch below {record.micro_batch} (auto finds one)")
    if options.get("recompute", "none") != "full" and "recompute" not in (record.auto_settings or ()):
        ways.append("recompute: full (auto tries less first)")
    spec = ENGINES.get(record.engine)
    ways.append(spec.less_memory(options) if spec and record.world_size > 1 else "more GPUs")
    if not is_on_gpu(record):
        ways.append("fewer processes on this machine")
    return ", or ".join(ways)
