"""The training loop: steps, their timing, and what is written down about them."""

import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megabench.config import ResolvedConfig, RunConfig
from megabench.data.batch import micro_batches
from megabench.data.source import TokenSource
from megabench.engines.base import StepResult, build_engine, process_groups
from megabench.hardware.catalog import find_gpu
from megabench.hardware.sampler import Sampler
from megabench.parallel.placement import Placement
from megabench.record import RunRecord
from megabench.runtime import device as devices
from megabench.runtime.messages import Progress, report_progress
from megabench.runtime.rendezvous import Rendezvous, is_supervised
from megabench.train.console import Console
from megabench.train.network import nccl_log_path, try_out
from megabench.train.outcome import Measured, build_record
from megabench.train.scalars import Scalars


def learning_rate_at(run: ResolvedConfig, step: int) -> float:
    """The learning rate of step `step`, counted from 0: linear warm-up to lr, then a cosine down to min_lr."""
    if step < run.lr_warmup:
        return run.lr * (step + 1) / run.lr_warmup
    progress = (step - run.lr_warmup) / max(1, run.steps - 1 - run.lr_warmup)
    return run.min_lr + (run.lr - run.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def train(
    run: ResolvedConfig, given: RunConfig, source: TokenSource, rendezvous: Rendezvous, placement: Placement
) -> RunRecord:
    """Trains `run` on this rank and returns its record, the same on every rank; rank 0 prints and writes.

    `given` is the configuration as the user gave it, for the command in the record.
    """
    started = time.perf_counter()
    report = rendezvous.store if is_supervised() else None
    if report:
        report_progress(report, rendezvous.rank, Progress("starting", 0, run.steps))
    rank = placement.rank_of(rendezvous.rank)
    device = devices.initialize(rendezvous, rank, run.device)
    name = devices.device_name(device)
    gpu = find_gpu(name) if device.type == "cuda" else None
    peak_tflops = gpu.peak_tflops(run.precision) if gpu else None
    console = Console(run, name, peak_tflops) if rank == 0 else None
    scalars = Scalars(run.tensorboard, run, peak_tflops) if rank == 0 and run.tensorboard else None
    if console:
        console.head(source.name)
    groups = process_groups(run)
    network = try_out(run.layout, placement.topology, groups, rendezvous.store, device, nccl_log_path())
    if console:
        console.network(placement, network)

    engine = build_engine(run, device)
    sampler = Sampler(device)
    results: list[StepResult] = []
    seconds: list[float] = []
    dist.barrier()
    border = time.perf_counter()
    for step in range(run.steps):
        if step == run.warmup_steps:
            sampler.reset()
        batches = micro_batches(source, run, run.layout.coordinates(rank).dp, step)
        learning_rate = learning_rate_at(run, step)
        results.append(engine.train_step(batches, learning_rate))
        devices.synchronize(device)
        # from border to border: data, logging and reports are part of a step
        previous, border = border, time.perf_counter()
        seconds.append(border - previous)
        memory = devices.peak_memory_gib(device)
        if console:
            console.step(step + 1, results[-1], learning_rate, seconds[-1], memory)
        if scalars:
            scalars.step(step + 1, results[-1], learning_rate, seconds[-1], memory, sampler.latest)
        if report:
            report_progress(report, rendezvous.rank, Progress("training", step + 1, run.steps))
    sampler.close()

    measured = Measured(
        results=results,
        step_seconds=slowest_rank(seconds, device),
        peak_memory_gib=gather(devices.peak_memory_gib(device), device),
        gpu_utilization=_mean_known(gather(sampler.mean if sampler.mean is not None else math.nan, device)),
        wall_seconds=time.perf_counter() - started,
        device_name=name,
        peak_tflops=peak_tflops,
        kernels=engine.kernels,
    )
    record = build_record(run, given, source, placement, network, measured)
    record_path = run.out / "record.json" if run.out else None
    if rank == 0 and record_path:
        record.write(record_path)
    if scalars:
        scalars.close()
    if console:
        console.last(record, record_path)
    dist.barrier()
    dist.destroy_process_group()
    return record


def slowest_rank(seconds: Sequence[float], device: torch.device) -> list[float]:
    """The time of each step on the rank that took longest."""
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def gather(value: float, device: torch.device) -> list[float]:
    """The value of every rank, by rank."""
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.cat(everyone).tolist()


def _mean_known(values: list[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None
