"""Trials that ended without a good result: what happened, and what to try."""

import re
from collections.abc import Iterator

from megabench.doctor.finding import Case, Finding, is_on_gpu
from megabench.record import RunRecord

_RANKS = re.compile(r"\branks? (\d+)")
# how a hung trial says where a group of ranks stands: "ranks 0, 2 in recv (x.py:1), 3–4 of 9 steps done"
_STAND = re.compile(r"ranks? (\d+)([^;]*?),? (?:(\d+)(?:–\d+)? of \d+ steps done|before (?:its|their) first step)")
_STOOD_STILL = "no progress for"  # the watch of a run, which ends it before the study's time limit does
_SHARED_MEMORY = re.compile(r"SIGBUS|/dev/shm|shared memory segment")


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
            if _SHARED_MEMORY.search(error):
                change = "give the container more shared memory: --shm-size=1g or more, or an emptyDir of medium Memory"
            elif "SIGKILL" in error:
                change = "look at dmesg for the out-of-memory killer; more host memory, or less offload"
            else:
                change = f"read {_log(_rank(error))}"
            yield Finding("untrustworthy", (record.trial,), "failed and has no result", error, change)


def hung(case: Case) -> Iterator[Finding]:
    """Trials in which no rank got on, or that came to no end."""
    for record in case.records:
        if _is_hang(record):
            error = record.error or "no result within timeout_seconds"
            rank = _rank(error) if record.status == "failed" else _behind(error)
            who = f"rank {rank}" if rank else "one of them"
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
    return record.status == "timeout" or (record.status == "failed" and _STOOD_STILL in (record.error or ""))


def _rank(error: str) -> str | None:
    found = _RANKS.search(error)
    return found[1] if found else None


def _behind(error: str) -> str | None:
    """The first of the ranks that have fewer steps behind them than the others; None where all are as far."""
    stands = sorted((int(steps or 0), rank) for rank, _, steps in _STAND.findall(error))
    is_clear = len(stands) == 1 or (len(stands) > 1 and stands[0][0] < stands[1][0])
    return stands[0][1] if is_clear else None


def _log(rank: str | None) -> str:
    return f"logs/TRIAL/rank-{rank or '*'}.log in the study's folder"


def _less_memory(record: RunRecord) -> str:
    """What would take less, the cheapest first."""
    options, ways = record.options, []
    if record.micro_batch > 1:
        ways.append(f"micro_batch below {record.micro_batch} (auto finds one)")
    if options.get("recompute", "none") != "full" and "--recompute auto" not in record.command:
        ways.append("recompute: full (auto tries less first)")
    ways.append(_more_sharding(record) if record.world_size > 1 else "more GPUs")
    if not is_on_gpu(record):
        ways.append("fewer processes on this machine")
    return ", or ".join(ways)


def _more_sharding(record: RunRecord) -> str:
    stage = record.options.get("zero_stage")
    if record.engine == "ddp":
        return "engine: fsdp, or deepspeed with zero_stage: 3, which shard what ddp copies"
    if record.engine == "megatron":
        return "a larger tp inside a host, or pp across hosts"
    if stage is not None and stage < 3:
        return "zero_stage: 3"
    if record.options.get("shard_size"):
        return "a larger shard_size"
    return "more GPUs" if record.options.get("offload") == "all" else "offload: all"
