"""The short run that measures a setting, and its result. Loads no torch."""

import statistics
from math import lcm
from typing import Literal

from megabench.config import RunConfig
from megabench.config.auto import AutoSetting, apply_setting
from megabench.config.run_config import ResolvedConfig
from megabench.parallel.layout import divisors
from megabench.record import Probe, RunRecord, Status

_WARMUP, _TIMED = 1, 2  # steps
_SEARCHED = 8  # extra steps in fp16 runs, because the loss scale may still change

# minimum number of sequences per stage, and of tokens, in a replica's step, so that settings can be compared
_ENOUGH_SEQUENCES, _ENOUGH_TOKENS = 16, 65536
_ROUNDS = 2  # micro-batches per stage and step, because peak memory includes the gradients of an earlier micro-batch
_SMALL = 8  # micro-batches up to this size are measured with the same global batch


def probe_config(config: RunConfig, setting: AutoSetting, world_size: int, device: Literal["cpu", "cuda"]) -> RunConfig:
    """Return the configuration of the short run that measures `setting`, with few steps and few sequences."""
    run = apply_setting(config, setting).resolve(world_size, device)
    plain = run.spec.plain_steps(run.options)
    changes = {
        "global_batch": _sequences(run) * run.layout.data_parallel,
        "steps": plain + _WARMUP + _TIMED + (_SEARCHED if run.policy.scales_loss else 0),
        "warmup_steps": plain + _WARMUP,
        "profile": False,
        **dict.fromkeys(("save", "save_every", "keep", "load", "out", "tensorboard")),
    }
    return apply_setting(config, setting).model_copy(update=changes)


def _sequences(run: ResolvedConfig) -> int:
    """Return how many sequences a replica processes in each step of a short run.

    All small micro-batches use the same number, so that their steps are comparable.
    """
    of_run = run.global_batch // run.layout.data_parallel
    if run.spec.fixes_batch(run.options):
        return of_run
    chunk = run.pp if run.vp > 1 else 1  # an interleaved schedule needs a multiple of this number of micro-batches
    small = lcm(*(size * chunk for size in divisors(of_run, _SMALL) if of_run % (size * chunk) == 0))
    whole = lcm(small, run.micro_batch * chunk)
    enough = max(_ENOUGH_SEQUENCES * run.pp, _ENOUGH_TOKENS // run.seq_length, _ROUNDS * run.pp * run.micro_batch)
    return min((number for number in divisors(of_run) if number >= enough and number % whole == 0), default=of_run)


def probe_result(
    setting: AutoSetting, short: RunConfig, status: Status, error: str | None, record: RunRecord | None
) -> Probe:
    """Return the result of the short run: median time of the steps that updated the weights, and peak memory."""
    seconds = _step_seconds(record) if record else None
    if record and seconds is None:
        status, error = "failed", f"none of the {record.num_steps} steps had finite gradients, so none was timed"
    return Probe(
        micro_batch=setting.micro_batch,
        recompute=setting.recompute,
        global_batch=short.global_batch or 0,
        status=status,
        error=error,
        step_seconds=seconds,
        peak_memory_gib=record.peak_memory_gib.max if record and record.peak_memory_gib else None,
    )


def _step_seconds(record: RunRecord) -> float | None:
    """Return the median step time, or None if no step counts.

    Warm-up steps, skipped steps (fp16 adapts its loss scale) and the first update, which creates the optimizer state,
    do not count.
    """
    timed = record.step_seconds.all if record.step_seconds else []
    seconds = [None] * (len(record.grad_norms) - len(timed)) + timed
    updates = [took for took, norm in zip(seconds, record.grad_norms, strict=True) if norm is not None]
    counted = [took for took in updates[1:] if took is not None]
    return statistics.median(counted) if counted else None
