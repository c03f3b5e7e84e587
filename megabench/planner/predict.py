"""Predict the runs of records, to compare predictions with measurements. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from megabench.config import ResolvedConfig
from megabench.cost.job import Candidate, Copies, Job, Recompute, Stack
from megabench.cost.profile import Profile
from megabench.errors import UserError
from megabench.hardware.topology import Topology
from megabench.models.find import find_model
from megabench.optim.optimizers import OPTIMIZERS
from megabench.parallel.layout import Layout
from megabench.parallel.placement import Policy
from megabench.planner.costs import Costs
from megabench.planner.engines.registry import PLANNED_ENGINES
from megabench.precision import Fp8Recipe
from megabench.record import Prediction, RunRecord


def job_of(record: RunRecord) -> Job:
    """Return the job of a record, with its kernels. Raises UserError if the model or the optimizer is unknown."""
    shape = find_model(record.model)
    if record.optimizer not in OPTIMIZERS:
        raise UserError(f"the optimizer {record.optimizer} of trial {record.trial} is unknown")
    if record.work_class and record.work_class.num_layers != shape.num_layers:
        shape = shape.with_layers(record.work_class.num_layers)
    fp8 = record.work_class and record.work_class.fp8
    return Job(
        shape,
        record.seq_length,
        record.global_batch,
        precision=record.precision,
        bytes_of_gradient=4 if record.grad_dtype == "fp32" else 2,
        fp8_recipe=cast(Fp8Recipe, fp8.recipe) if fp8 else "tensorwise",
        num_layers_at_start_in_bf16=fp8.num_layers_at_start_in_bf16 if fp8 else 0,
        num_layers_at_end_in_bf16=fp8.num_layers_at_end_in_bf16 if fp8 else 0,
        optimizer=record.optimizer,
        stack=_stack_of(record),
    )


def _stack_of(record: RunRecord) -> Stack:
    """Return the kernels of a record. A run that has not recorded them is assumed to have those of plans."""
    options, traits = record.options, record.kernel_traits
    stages: Literal["balanced", "even"] = options.get("stages", "balanced")
    stack = Stack(
        stages=stages,
        copies=_copies_of(record),
        keeps_gathered=bool(options.get("keep_gathered")),
        keeps_transposed=bool(options.get("keep_transposed", True)),
    )
    if traits is None:
        return stack
    return replace(
        stack,
        flash_attention=traits.flash_attention is not False,
        exchanges_heads=traits.exchanges_heads,
        fused=traits.fused_activation is not False,
        fused_loss=traits.fused_loss is not False,
        fuses_weight_gradient=traits.fuses_weight_gradient,
        fuses_fp8_weight_gradient=traits.fuses_fp8_weight_gradient,
        adds_output_gradient=traits.adds_output_gradient,
    )


def _copies_of(record: RunRecord) -> Copies:
    """Return whether copy engines were used, or would be. The planner decides if the run recorded no kernels."""
    if record.kernel_traits:
        return "always" if record.kernel_traits.copies_tp else "never"
    given: dict[Any, Copies] = {"copy-engines": "always", "nccl": "never"}
    return given.get(record.options.get("tp_overlap"), "auto")


def candidate_of(record: RunRecord) -> Candidate | None:
    """Return the candidate that corresponds to a record, or None if the planner cannot predict the engine."""
    if record.engine not in PLANNED_ENGINES:
        return None
    layout, options = record.layout, record.options
    placement = record.placement.policy if record.placement else options.get("placement") or "topology"
    return Candidate(
        record.engine,
        Layout(tp=layout.tp, cp=layout.cp, pp=layout.pp, vp=layout.vp, dp=layout.dp),
        record.micro_batch,
        PLANNED_ENGINES[record.engine].variant_of(options),
        recompute=cast(Recompute, options.get("recompute", "none")),
        placement=cast(Policy, placement),
        is_compiled=bool(options.get("compile")),
    )


def is_planned(run: ResolvedConfig) -> bool:
    """Return whether plans describe the run: a planned engine, with fused kernels and without gradient compression."""
    return run.engine in PLANNED_ENGINES and run.kernels != "reference" and not run.spec.compression(run.options)


def work_of(job: Job) -> Job:
    """Return the job of a plan for the same work, with the kernels and the options that plans assume."""
    return replace(job, stack=Stack())


@dataclass(frozen=True)
class Predictor:
    """Predicts the records of a study on a topology. `planned` are the trials that the plan added, best first.

    Trials can limit the network between emulated hosts to different bandwidths.
    """

    topology: Topology
    profile: Profile
    planned: Sequence[str]

    def predict(self, record: RunRecord) -> Prediction | None:
        """Predict the run.

        Return None if the number of ranks differs from the plan, or if the model or the engine cannot be predicted.
        """
        candidate = candidate_of(record)
        if record.world_size != self.topology.world_size or candidate is None:
            return None
        try:
            estimate = Costs(job_of(record), self._topology_of(record), self.profile).estimate(candidate)
        except UserError:
            return None
        rank = self.planned.index(record.trial) + 1 if record.trial in self.planned else None
        return Prediction(
            step_seconds=estimate.step_seconds,
            tokens_per_second_per_device=estimate.tokens_per_second_per_device,
            peak_memory_gib=estimate.memory.total / 2**30,
            profile=self.profile.name,
            relative_error=self.profile.relative_error,
            planned_rank=rank,
        )

    def _topology_of(self, record: RunRecord) -> Topology:
        """Return the topology with the bandwidth to which the run limited the network between emulated hosts."""
        limit = record.emulated_network
        return self.topology.with_emulated_network(limit.gb_per_s if limit else None)
