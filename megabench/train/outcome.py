"""The RunRecord of a run that trained to its end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megabench.config import ResolvedConfig, RunConfig
from megabench.config.requested_fields import asked_for, left_open
from megabench.data.source import TokenSource
from megabench.engines.base import StepResult
from megabench.metrics import quantile, throughput
from megabench.parallel.placement import Placement
from megabench.record import (
    HostRanks,
    KernelTraits,
    LoadTimes,
    Machine,
    NicTraffic,
    PeakMemory,
    PlacementUsed,
    Probe,
    RunRecord,
    SaveTimes,
    StepProfile,
    StepSeconds,
    TflopsPerDevice,
    WorkClass,
)
from megabench.runtime import environment
from megabench.train.network import Network


@dataclass(frozen=True)
class Measured:
    """What the loop saw; `step_seconds` and `peak_memory_gib` are of all ranks."""

    results: Sequence[StepResult]
    step_seconds: Sequence[float]
    device_memory_gib: float | None
    peak_memory_gib: list[float]
    gpu_utilization: float | None
    gpu_watts: float | None
    nics: dict[str, dict[str, NicTraffic]]
    machines: list[Machine]
    wire_bytes: dict[str, float] | None
    wall_seconds: float
    device_name: str
    peak_tflops: float | None
    kernels: dict[str, str]
    kernel_traits: KernelTraits
    num_done: int  # steps of earlier runs
    stopped_by: str | None
    saves: list[SaveTimes]
    load: LoadTimes | None
    probes: list[Probe] | None
    profile: StepProfile | None


def build_record(
    run: ResolvedConfig,
    given: RunConfig,
    source: TokenSource,
    placement: Placement,
    network: Network,
    measured: Measured,
) -> RunRecord:
    """The record of a run; throughput is of the steps after warm-up, and absent when there are none."""
    timed = list(measured.step_seconds[run.warmup_steps :])
    achieved = throughput(timed, run.shape, run.seq_length, run.global_batch, run.world_size)
    layout = run.layout
    speed: dict[str, Any] = {}
    if achieved:
        speed = {
            "step_seconds": StepSeconds(
                median=achieved.step_seconds, p10=quantile(timed, 0.1), p90=quantile(timed, 0.9), all=timed
            ),
            "tokens_per_second": achieved.tokens_per_second,
            "tokens_per_second_per_device": achieved.tokens_per_second_per_device,
            "samples_per_second": achieved.samples_per_second,
            "model_tflops_per_device": TflopsPerDevice(
                causal=achieved.tflops_per_device_causal, full=achieved.tflops_per_device_full
            ),
            "mfu": achieved.mfu(measured.peak_tflops),
            "days_per_100b_tokens": achieved.days_per_100b_tokens,
        }
    return RunRecord(
        **asked_for(run, given),
        **left_open(given),
        trial=run.out.name if run.out else f"{run.engine}-{layout}",
        work_class=work_class(run, source),
        status="ok",
        num_hosts=len(placement.topology.hosts),
        device=measured.device_name,
        kernels=measured.kernels,
        kernel_traits=measured.kernel_traits,
        first_step_seconds=measured.step_seconds[0],
        warmup_seconds=sum(measured.step_seconds[: run.warmup_steps]),
        wall_seconds=measured.wall_seconds,
        peak_tflops=measured.peak_tflops,
        peak_memory_gib=PeakMemory(max=max(measured.peak_memory_gib), per_rank=measured.peak_memory_gib),
        device_memory_gib=measured.device_memory_gib,
        gpu_utilization=measured.gpu_utilization,
        gpu_watts=measured.gpu_watts,
        nics=measured.nics,
        machines=measured.machines,
        wire_bytes=measured.wire_bytes,
        first_step=measured.num_done + 1,
        stopped_by=measured.stopped_by,
        losses=[result.loss for result in measured.results],
        grad_norms=[result.grad_norm for result in measured.results],
        num_skipped_steps=sum(result.skipped for result in measured.results),
        placement=PlacementUsed(
            policy=placement.policy,
            launcher_ranks=list(placement.launcher_ranks),
            hosts=[
                HostRanks(name=host.name, ranks=sorted(ranks))
                for host, ranks in zip(placement.topology.hosts, placement.topology.ranks_by_host, strict=True)
            ],
            nccl_num_nodes=network.nccl_num_nodes,
        ),
        groups=network.groups,
        link_bandwidth=network.bandwidth,
        saves=measured.saves,
        load=measured.load,
        probes=measured.probes,
        profile=measured.profile,
        warnings=[*placement.warnings, *network.warnings, *unsaved(measured.saves)],
        environment=environment.collect(),
        **speed,
    )


def unsaved(saves: list[SaveTimes]) -> list[str]:
    """What to say of saves that failed."""
    return [f"no checkpoint of step {save.step}: {save.error}" for save in saves if save.error]


def work_class(run: ResolvedConfig, source: TokenSource) -> WorkClass:
    """What another run must have in common with `run` to be comparable."""
    schedule = {"lr": run.lr, "min_lr": run.min_lr, "lr_warmup": run.lr_warmup, "steps": run.steps}
    rules = {"weight_decay": run.weight_decay, "clip_grad": run.clip_grad}
    if run.optimizer == "adamw":
        rules |= {"beta1": run.betas[0], "beta2": run.betas[1], "eps": run.eps}
    return WorkClass(
        model=run.model,
        num_layers=run.shape.num_layers,
        data=source.name,
        data_sha256=source.sha256,
        seed=run.seed,
        optimizer=run.optimizer,
        schedule=schedule | rules,
        precision=run.precision,
        grad_dtype=run.grad_dtype,
        global_batch=run.global_batch,
        seq_length=run.seq_length,
        compression=run.spec.compression(run.options),
    )
