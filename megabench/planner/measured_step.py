"""The measured step time of a person's own run, and what usually explains the rest. Loads no torch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from megabench import inputs
from megabench.config import ConfigError
from megabench.cost.job import Job
from megabench.planner.costs import Costs, Estimate
from megabench.planner.engines.sharding import Sharding
from megabench.planner.own_layout import OwnLayout
from megabench.planner.search import Plan

# A cause is plausible if its predicted seconds are between these shares of the unexplained ones.
_LEAST_SHARE, _MOST_SHARE = 0.2, 1.5
_SAME_BATCH = 0.1  # largest relative difference between the batch of a log, whose rates are rounded, and the plan's
_FIRST_STEPS = 0.1  # share of the steps of a progress bar that may compile, and do not count
_NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?)(?![\w.])"
_COUNT = r"(\d{1,9})"
# "20/50 [06:32<09:48, 19.62s/it]". Bars of other units, such as examples/s, do not count steps.
_PROGRESS = re.compile(
    rf"(?<!\d){_COUNT}/{_COUNT} \[(?:{_COUNT}:)?{_COUNT}:{_COUNT}<[\d:?]+, *[\d.?]+(?:s/it|it/s)[],]"
)
_SAMPLES_PER_SECOND = re.compile(rf"CurrSamplesPerSec={_NUMBER}")
_NUM_STEPS = re.compile(rf'"global_step": {_COUNT}\b')
_SUMMARY = re.compile(rf"['\"](train_\w+)['\"]: ['\"]?{_NUMBER}")
_MOST_SECONDS = 1e6


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step time in seconds. `has_first_steps` is whether it may include steps that compile."""

    seconds: float
    has_first_steps: bool


def read_measured(text: str, job: Job) -> MeasuredStep:
    """Return the step time of a text such as "19.6", or of a log of HF Trainer or DeepSpeed with this name.

    Raises ConfigError if the file has no step time, or if its global batch differs from the job's.
    """
    try:
        seconds = float(text)
    except ValueError:
        return _of_file(Path(text), job)
    if not 0 < seconds < _MOST_SECONDS:
        raise ConfigError(f"--measured {text} is no step time; use the seconds of a step, e.g. --measured 19.6")
    return MeasuredStep(seconds, has_first_steps=True)


def _of_file(path: Path, job: Job) -> MeasuredStep:
    try:
        text = inputs.read_text(path, inputs.LARGE)
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise ConfigError(f"--measured {path}: {what}; use the seconds of a step, or a readable log") from None
    summary = dict(_SUMMARY.findall(text))
    counted = _of_summary(text, summary)
    found = counted or _of_deepspeed(text, job) or _of_progress(text)
    if not found or not 0 < found.seconds < _MOST_SECONDS:
        raise ConfigError(
            f"--measured {path} has no step time; use trainer_state.json or the output of a finished HF Trainer run, "
            f"or a DeepSpeed log with CurrSamplesPerSec"
        )
    batch = float(summary.get("train_samples_per_second", 0)) * counted.seconds if counted else 0
    if batch and abs(batch / job.global_batch - 1) > _SAME_BATCH:
        raise ConfigError(
            f"--measured {path}: its steps have about {batch:,.0f} sequences, but the plan's have {job.global_batch}; "
            f"use --global-batch {max(1, round(batch))}"
        )
    return found


def _of_deepspeed(text: str, job: Job) -> MeasuredStep | None:
    """Return the median step of DeepSpeed's throughput timer, which leaves out the first two steps."""
    rates = [rate for found in _SAMPLES_PER_SECOND.findall(text) if (rate := float(found)) > 0]
    return MeasuredStep(job.global_batch / median(rates), has_first_steps=False) if rates else None


def _of_progress(text: str) -> MeasuredStep | None:
    """Return the mean step between the first steps and the last one of the longest progress bar of HF Trainer."""
    bars: dict[int, dict[int, int]] = {}
    for step, total, hours, minutes, seconds in _PROGRESS.findall(text):
        elapsed = 3600 * int(hours or 0) + 60 * int(minutes) + int(seconds)
        bars.setdefault(int(total), {}).setdefault(int(step), elapsed)
    for total in sorted(bars, reverse=True):
        times = {step: elapsed for step, elapsed in bars[total].items() if step >= _FIRST_STEPS * total}
        first, last = min(times, default=0), max(times, default=0)
        if times and times[last] > times[first]:
            return MeasuredStep((times[last] - times[first]) / (last - first), has_first_steps=first == 0)
    return None


def _of_summary(text: str, summary: dict[str, str]) -> MeasuredStep | None:
    """Return the mean step of the summary that HF Trainer prints, and writes to trainer_state.json, after training."""
    num_steps = int(found[1]) if (found := _NUM_STEPS.search(text)) else 0
    runtime, rate = (float(summary.get(name, 0)) for name in ("train_runtime", "train_steps_per_second"))
    if not runtime or not (num_steps or rate):
        return None
    return MeasuredStep(runtime / num_steps if num_steps else 1 / rate, has_first_steps=True)


def explanations(plan: Plan, own: OwnLayout, predicted: Estimate, measured: MeasuredStep) -> list[str]:
    """Return sentences about the difference between the measured and the predicted step, the likeliest cause first."""
    error, ratio = plan.profile.relative_error, measured.seconds / predicted.step_seconds
    start = f"A step should take {predicted.step_seconds:.3g} s, and took {measured.seconds:.3g} s"
    if ratio <= 1 / (1 + error):
        return [
            f"{start}, which is faster than predicted by more than the prediction error of {error:.0%}: check that "
            f"model, sequence length, global batch and number of GPUs are those of the run."
        ]
    if ratio <= 1 + error:
        return [f"{start}, which agrees within the prediction error of {error:.0%}."]
    rest = measured.seconds - predicted.step_seconds
    causes = sorted(
        ((seconds, text) for text, seconds in _causes(plan, own, predicted)), key=lambda cause: abs(cause[0] - rest)
    )
    found = [
        f"{text} would add {seconds:.2g} s."
        for seconds, text in causes
        if _LEAST_SHARE * rest <= seconds <= _MOST_SHARE * rest
    ]
    others = "data loading, checkpoints, or other programs on the GPUs"
    first = "first steps that compile or connect, " * measured.has_first_steps
    found.append(f"The plan does not count {first}{others}.")
    return [f"{start}, {ratio:.2f} × as long: {rest:.2g} s are not explained.", *found]


def _causes(plan: Plan, own: OwnLayout, predicted: Estimate) -> Iterator[tuple[str, float]]:
    """Yield what makes runs of other programs slower, with the predicted seconds that it adds to a step."""
    candidate, job = predicted.candidate, plan.job

    def added(costs: Costs, **changes: Any) -> float:
        return costs.estimate(replace(candidate, **changes)).step_seconds - predicted.step_seconds

    if "mb" not in own.sizes and candidate.micro_batch > 1:
        yield "A micro-batch of 1", added(plan.costs, micro_batch=1)
    if candidate.recompute != "full" and not own.options & {"none", "selective"}:
        yield "Full recomputation", added(plan.costs, recompute="full")
    plain = replace(job.stack, fused=False, fused_loss=False, fuses_weight_gradient=False)
    yield "Unfused kernels (norms, activations, loss)", added(_with_stack(plan, plain))
    yield "Attention without FlashAttention", added(_with_stack(plan, replace(job.stack, flash_attention=False)))
    variant = candidate.variant
    if isinstance(variant, Sharding) and variant.offload == "none" and variant.zero_stage:
        yield "Offload of the optimizer to the CPU", added(plan.costs, variant=replace(variant, offload="optimizer"))
    if len(plan.topology.hosts) > 1 and plan.topology.hosts[0].network != "socket":
        hosts = tuple(
            replace(host, network="socket", network_gbits=None, ring_gbits=None) for host in plan.topology.hosts
        )
        sockets = Costs(job, replace(plan.topology, hosts=hosts), plan.profile)
        text = "A network that NCCL uses over sockets (NET/Socket in its log)"
        yield text, added(sockets)


def _with_stack(plan: Plan, stack: Any) -> Costs:
    return Costs(replace(plan.job, stack=stack), plan.topology, plan.profile)
