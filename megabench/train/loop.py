"""The training loop: steps, their timing, and what is written down about them."""

import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megabench.checkpoint.health import count_non_finite
from megabench.config import ResolvedConfig, RunConfig
from megabench.data.batch import micro_batches
from megabench.data.source import TokenSource
from megabench.engines.base import StepResult
from megabench.engines.build import build_engine, process_groups
from megabench.hardware.catalog import find_gpu
from megabench.hardware.health import Checkup, worst_of_hosts
from megabench.hardware.sampler import Sampler
from megabench.parallel.placement import Placement
from megabench.record import Machine, NicTraffic, Probe, RunRecord
from megabench.runtime import device as devices
from megabench.runtime.messages import Progress, outlast, report_progress
from megabench.runtime.rendezvous import Rendezvous, is_supervised
from megabench.runtime.run_lock import Claim
from megabench.train.checkpoints import Checkpoints, restore
from megabench.train.console import Console
from megabench.train.finite import FiniteWatch
from megabench.train.network import nccl_log_path, try_out
from megabench.train.outcome import Measured, build_record
from megabench.train.profile import profile_step
from megabench.train.resume import Resume
from megabench.train.scalars import Scalars
from megabench.train.signals import StopSignal
from megabench.train.stopped import StoppedError
from megabench.train.watch import BEFORE_FIRST_STEP, Watch
from megabench.train.wire import WireBytes


def learning_rate_at(run: ResolvedConfig, step: int) -> float:
    """The learning rate of step `step`, counted from 0: linear warm-up to lr, then a cosine down to min_lr."""
    if step < run.lr_warmup:
        return run.lr * (step + 1) / run.lr_warmup
    progress = (step - run.lr_warmup) / max(1, run.steps - 1 - run.lr_warmup)
    return run.min_lr + (run.lr - run.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def train(
    run: ResolvedConfig,
    given: RunConfig,
    source: TokenSource,
    rendezvous: Rendezvous,
    placement: Placement,
    resume: Resume,
    watch: Watch,
    probes: list[Probe] | None,
) -> RunRecord:
    """Trains `run` on this rank and returns its record, the same on every rank; rank 0 prints and writes.

    `given` is the configuration as the user gave it, and `probes` what was tried to complete it. Raises ClaimedError,
    on rank 0, where another run writes into its folders, and StoppedError where one has taken them over, where losses
    are not finite, and at the end where the last state was not saved or the record is not in its place.
    """
    started = time.perf_counter()
    report = rendezvous.store if is_supervised() else None
    if report:
        report_progress(report, rendezvous.rank, Progress("starting", 0, run.steps))
    rank = placement.rank_of(rendezvous.rank)
    claims = {folder: Claim(folder) for folder in (run.out, run.save) if folder} if rank == 0 else {}
    # the watch knows who is to blame, and speaks first
    patience = timedelta(seconds=max(600.0, 2 * BEFORE_FIRST_STEP * run.stall_seconds))
    device = devices.initialize(rendezvous, rank, run.device, patience)
    name = devices.device_name(device)
    gpu = find_gpu(name) if device.type == "cuda" else None
    peak_tflops = gpu.peak_tflops(run.precision) if gpu else None
    console = Console(run, name, peak_tflops) if rank == 0 else None
    scalars = None
    if console and run.tensorboard:
        scalars = Scalars(run.tensorboard, run, peak_tflops, resume.num_done, console.note)
    if console:
        console.head(source.name)
        for note in resume.notes:
            console.note(note)
    groups = process_groups(run)
    network = try_out(run.layout, placement.topology, groups, rendezvous.store, device, nccl_log_path())
    if console:
        console.network(placement, network)

    engine = build_engine(run, device)
    load = None
    if resume.found and resume.training:
        watch.at("loading", resume.num_done)
        load = restore(engine, resume.found, device)
        if console:
            console.resumed(load, resume.training)
    checkpoints = None
    if run.save:
        mine = claims.get(run.save)
        checkpoints = Checkpoints(run, source, engine, rendezvous, resume, device, console, watch.gets_on, mine)
    finite = FiniteWatch(run)
    uuid = devices.gpu_uuid(rendezvous.local_rank) if device.type == "cuda" else None
    checkup = Checkup(_hosts(placement)[rank], uuid, own={int(pid) for pid in gather(os.getpid(), device)})
    sampler = Sampler(device, uuid, reads_nics=rendezvous.local_rank == 0)
    wire: dict[str, float] | None = None
    results: list[StepResult] = []
    seconds: list[float] = []
    stop, stopped_by = StopSignal(), None
    if checkpoints:
        stop.install()  # not before: a run that has not begun has nothing to save, and may wait for a rank that is lost
    dist.barrier()
    watch.at("first step", resume.num_done)
    border = time.perf_counter()
    for step in range(resume.num_done, run.steps):
        if step == resume.num_done + run.warmup_steps:
            sampler.reset()
        batches = micro_batches(source, run, run.layout.coordinates(rank).dp, step)
        learning_rate = learning_rate_at(run, step)
        # counting takes time: the last step that is not timed, unless it is the first
        if run.warmup_steps >= 2 and step == resume.num_done + run.warmup_steps - 1:
            with WireBytes(run.layout) as counted:
                results.append(engine.train_step(batches, learning_rate))
            wire = counted.mean_of_all()
        else:
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
        is_wrong = finite.is_wrong(results[-1])
        if checkpoints:
            checkpoints.observe(step + 1, results[-1], is_wrong)
        if is_wrong:
            non_finite = _sum_of_all(count_non_finite(engine.training_state().shards)) if run.can_be_saved else None
            rank_losses = gather(engine.rank_loss, device)
            problem = finite.describe(step + 1, results[-1], rank_losses, _hosts(placement), non_finite)
            if finite.must_stop(results[-1], non_finite):
                if checkpoints:
                    checkpoints.close()
                    problem += f"; {checkpoints.newest_healthy}"
                raise StoppedError(problem)
            if console:
                console.note(f"WARNING: {problem}")
        if checkpoints:
            checkpoints.look()
            stopped_by = stop.agreed(device)
            is_last = stopped_by is not None or step + 1 == run.steps
            if due_step := checkpoints.due_step(step + 1, is_last):
                watch.at("saving", step + 1)
                border += checkpoints.save(due_step)
        watch.at("training", step + 1)
        if stopped_by:
            break
    sampler.close()
    watch.at("saving", resume.num_done + len(results))
    not_saved = checkpoints.close() if checkpoints else None
    peak_memory = gather(devices.peak_memory_gib(device), device)
    profile = None
    if run.profile and not stopped_by:
        watch.at("profiling", resume.num_done + len(results))
        batches = micro_batches(source, run, run.layout.coordinates(rank).dp, run.steps - 1)
        traces = run.out / "trace" if run.out else None
        profile = profile_step(engine, batches, learning_rate_at(run, run.steps - 1), run.layout, device, traces)

    measured = Measured(
        results=results,
        step_seconds=slowest_rank(seconds, device),
        device_memory_gib=devices.memory_gib(device),
        peak_memory_gib=peak_memory,
        gpu_utilization=_mean_known(gather(sampler.mean.utilization if sampler.mean else math.nan, device)),
        gpu_watts=_mean_known(gather(sampler.mean.watts if sampler.mean else math.nan, device)),
        nics=_nics_of_all(sampler, _hosts(placement)),
        machines=_machines_of_all(checkup.close(sampler.throttle)),
        wire_bytes=wire,
        wall_seconds=time.perf_counter() - started,
        device_name=name,
        peak_tflops=peak_tflops,
        kernels=engine.kernels,
        kernel_traits=engine.kernel_traits,
        num_done=resume.num_done,
        stopped_by=stopped_by,
        saves=checkpoints.times if checkpoints else [],
        load=load,
        probes=probes,
        profile=profile,
    )
    record = build_record(run, given, source, placement, network, measured)
    record_path, wrong = _write_record(record, claims[run.out]) if run.out in claims else (None, None)
    everyone_hears = [wrong]
    dist.broadcast_object_list(everyone_hears)
    not_kept = [reason for reason in (not_saved, *everyone_hears) if reason]
    if console:
        console.last(record, record_path)
    if scalars:
        scalars.close()
    for claim in claims.values():
        claim.release()
    dist.barrier()
    watch.close()
    dist.destroy_process_group()
    outlast(rendezvous.store, rendezvous.rank, rendezvous.world_size, "training")
    if not_kept:
        raise StoppedError("; ".join(not_kept))
    return record


def _write_record(record: RunRecord, claim: Claim) -> tuple[Path | None, str | None]:
    """Where the record is, and a sentence where it is not, or not where it should be: another run's stays."""
    path, wrong = claim.folder / "record.json", None
    if loss := claim.loss:
        path = path.with_name(f"record-of-{os.getpid()}.json")
        wrong = f"{loss} This run's record is {path}"
    try:
        record.write(path)
    except OSError as error:
        return None, f"{path} could not be written: {error.strerror}"
    return path, wrong


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


def _sum_of_all(mine: Counter[str]) -> Counter[str]:
    """The counts of all ranks, added up."""
    everyone: list[Counter[str]] = [Counter()] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return sum(everyone, Counter())


def _mean_known(values: list[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None


def _nics_of_all(sampler: Sampler, hosts: Sequence[str]) -> dict[str, dict[str, NicTraffic]]:
    """What each host's interfaces moved, by host and interface."""
    seconds = sampler.nic_seconds
    mine = {
        name: NicTraffic(sent_gb_per_s=nic.sent / 1e9 / seconds, received_gb_per_s=nic.received / 1e9 / seconds)
        for name, nic in sampler.nics.items()
    }
    everyone: list[dict[str, NicTraffic]] = [{} for _ in hosts]
    dist.all_gather_object(everyone, mine)
    return {host: nics for host, nics in zip(hosts, everyone, strict=True) if nics}


def _machines_of_all(mine: Machine) -> list[Machine]:
    """What the ranks saw of their hosts, one for each host."""
    everyone: list[Machine] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return worst_of_hosts(everyone)


def _hosts(placement: Placement) -> list[str]:
    """The name of each rank's host, by rank."""
    names: dict[int, str] = {}
    for host, ranks in zip(placement.topology.hosts, placement.topology.ranks_by_host, strict=True):
        names |= dict.fromkeys(ranks, host.name)
    return [names[rank] for rank in sorted(names)]
