"""Build and write the RunRecord of a finished run."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megabench.config import ResolvedConfig
from megabench.config.record_fields import auto_fields, requested_fields
from megabench.data.source import TokenSource
from megabench.metrics import BUILT_IN_METRICS, quantile, throughput
from megabench.optim.optimizers import OPTIMIZERS
from megabench.record import (
    Fp8Work,
    HostRanks,
    PeakMemory,
    PlacementUsed,
    RunRecord,
    SaveTimes,
    StepSeconds,
    TflopsPerDevice,
    WorkClass,
)
from megabench.runtime import device as devices
from megabench.runtime import environment
from megabench.runtime.run_lock import RunLock
from megabench.train.callbacks.callback import Callback, Step, TrainerState


def build_record(
    trainer: TrainerState, seconds: Sequence[float], peak_memory_gib: Sequence[float], sections: Mapping[str, Any]
) -> RunRecord:
    """Return the record of a finished run.

    `seconds` holds the time of each step on the slowest rank. `peak_memory_gib` holds the peak memory of each rank.
    `sections` holds the fields that callbacks add to the record. Throughput is computed from the steps after warm-up,
    and is absent if there are none.
    """
    run, placement, network = trainer.run, trainer.placement, trainer.network
    results, saves = [step.result for step in trainer.steps], trainer.saves
    return RunRecord(
        **requested_fields(trainer.requested, trainer.given),
        **auto_fields(trainer.given),
        trial=run.out.name if run.out else f"{run.engine}-{run.layout}",
        work_class=work_class(run, trainer.source),
        tokenizer=trainer.source.tokenizer,
        status="ok",
        num_hosts=len(placement.topology.hosts),
        device=trainer.device_name,
        kernels=trainer.engine.kernels,
        kernel_traits=trainer.engine.kernel_traits,
        first_step_seconds=seconds[0],
        warmup_seconds=sum(seconds[: run.warmup_steps]),
        wall_seconds=time.perf_counter() - trainer.started,
        ended_at=datetime.now(UTC).isoformat(timespec="seconds"),
        peak_tflops=trainer.peak_tflops,
        peak_memory_gib=PeakMemory(max=max(peak_memory_gib), per_rank=list(peak_memory_gib)),
        device_memory_gib=devices.memory_gib(trainer.device),
        first_step=trainer.num_before + 1,
        stopped_by=trainer.stopped_by,
        losses=[result.loss for result in results],
        grad_norms=[result.grad_norm for result in results],
        learning_rates=[step.learning_rate for step in trainer.steps],
        metrics=_metrics_of_callbacks(trainer.steps),
        peak_memory_gib_by_step=[step.peak_memory_gib for step in trainer.steps],
        num_skipped_steps=sum(result.skipped for result in results),
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
        saves=saves,
        load=trainer.load,
        probes=trainer.probes,
        rollbacks=list(trainer.rollbacks),
        warnings=[
            *trainer.source.warnings,
            *placement.warnings,
            *network.warnings,
            *trainer.engine.warnings,
            *unsaved(saves),
            *(rollback.sentence for rollback in trainer.rollbacks),
        ],
        environment=environment.collect(),
        **speed_fields(run, seconds[run.warmup_steps :], trainer.peak_tflops),
        **sections,
    )


def json_section(callback: Callback, by_rank: Sequence[Any]) -> Any:
    """Return the section of a user's callback as JSON. Values that are no JSON become strings."""
    return json.loads(json.dumps(dict(callback.section(by_rank)), default=str))


def write_record(record: RunRecord | None, lock: RunLock | None) -> tuple[Path | None, str | None]:
    """Write the record, if there is one, to the locked output directory.

    Return the record's path, and an error message if writing failed or another run took the directory over.
    """
    if not record or not lock:
        return None, None
    path, wrong = lock.folder / "record.json", None
    if loss := lock.loss:
        path = path.with_name(f"record-of-{os.getpid()}.json")
        wrong = f"{loss} This run's record is {path}"
    try:
        record.write(path)
    except OSError as error:
        return None, loss or f"{path} could not be written: {error.strerror}"
    return path, wrong


def _metrics_of_callbacks(steps: Sequence[Step]) -> dict[str, list[float | None]]:
    """Return the metrics that callbacks added, by tag, with None for each step without a value."""
    tags = sorted({tag for step in steps for tag in step.metrics} - BUILT_IN_METRICS)
    return {tag: [step.metrics.get(tag) for step in steps] for tag in tags}


def speed_fields(run: ResolvedConfig, timed: Sequence[float], peak_tflops: float | None) -> dict[str, Any]:
    """Return the record fields that depend on the seconds of the timed steps, or {} if no step was timed."""
    achieved = throughput(timed, run.shape, run.seq_length, run.global_batch, run.world_size)
    if not achieved:
        return {}
    return {
        "step_seconds": StepSeconds(
            median=achieved.step_seconds, p10=quantile(timed, 0.1), p90=quantile(timed, 0.9), all=list(timed)
        ),
        "tokens_per_second": achieved.tokens_per_second,
        "tokens_per_second_per_device": achieved.tokens_per_second_per_device,
        "samples_per_second": achieved.samples_per_second,
        "model_tflops_per_device": TflopsPerDevice(
            causal=achieved.tflops_per_device_causal, full=achieved.tflops_per_device_full
        ),
        "mfu": achieved.mfu(peak_tflops),
        "days_per_100b_tokens": achieved.days_per_100b_tokens,
    }


def unsaved(saves: list[SaveTimes]) -> list[str]:
    """Return an error message for each failed save."""
    return [f"the checkpoint of step {save.step} was not saved: {save.error}" for save in saves if save.error]


def fp8_work(run: ResolvedConfig) -> Fp8Work | None:
    """Return the fp8 settings of the run, or None if it has no fp8 products."""
    if run.fp8_recipe is None:
        return None
    return Fp8Work(
        recipe=run.fp8_recipe,
        num_layers_at_start_in_bf16=run.num_layers_at_start_in_bf16,
        num_layers_at_end_in_bf16=run.num_layers_at_end_in_bf16,
    )


def work_class(run: ResolvedConfig, source: TokenSource) -> WorkClass:
    """Return the properties that must be equal for another run to be comparable with `run`."""
    schedule: dict[str, float | str] = {"lr": run.lr, "min_lr": run.min_lr, "lr_warmup": run.lr_warmup}
    schedule |= {"steps": run.steps, "weight_decay": run.weight_decay, "clip_grad": run.clip_grad}
    if OPTIMIZERS[run.optimizer].has_betas:
        schedule |= {"beta1": run.betas[0], "beta2": run.betas[1], "eps": run.eps}
    if run.schedule != "cosine":
        schedule["schedule"] = run.schedule
    if run.param_groups:
        schedule["param_groups"] = run.param_groups
    if run.decay_steps:
        schedule["decay_steps"] = run.decay_steps
    found = WorkClass(
        model=run.model,
        num_layers=run.shape.num_layers,
        data=source.name,
        data_sha256=source.sha256,
        seed=run.seed,
        optimizer=run.optimizer,
        schedule=schedule,
        precision=run.precision,
        grad_dtype=run.grad_dtype,
        global_batch=run.global_batch,
        seq_length=run.seq_length,
        compression=run.spec.compression(run.options),
        fp8=fp8_work(run),
        data_seed=None if run.data_seed == run.seed else run.data_seed,
    )
    return found.model_copy(update=dict(run.spec.other_work(run)))
