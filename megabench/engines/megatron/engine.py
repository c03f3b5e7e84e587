"""The megatron engine: forward and backward under megatron-core's schedules, and its distributed optimizer."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from megabench.checkpoint.shards import StateShard, TrainingState, blocks_of
from megabench.config import ResolvedConfig
from megabench.data.batch import Batch
from megabench.engines.base import Engine, StepResult, TensorKind
from megabench.engines.common import kernels
from megabench.engines.common.fp8 import forget_casts
from megabench.engines.common.initial_weights import initial_weights
from megabench.engines.common.optim import apex_adam, set_learning_rate, squared_norm
from megabench.engines.megatron.blocks import zigzag_slice
from megabench.engines.megatron.gather import full_tensors
from megabench.engines.megatron.model import (
    ParallelLlama,
    create_process_groups,
    load_weights,
    loss_factor,
    transformer_config,
    whole_model_name,
)
from megabench.engines.megatron.optimizer import build_optimizer
from megabench.engines.megatron.state import loss_scale_of, optimizer_step, set_loss_scale, set_optimizer_step, shards
from megabench.models.mapping import shard
from megabench.parallel.axes import FACTORS
from megabench.record import KernelTraits
from megabench.runtime.megatron_core import buffer_layout, gradients_for_norm
from megabench.specs.megatron import chunk_layers, optimizer_copies

# parameters per bucket of gradients, as megatron-core's DistributedDataParallel chooses them
BUCKET_SIZE = 40_000_000
BUCKET_SIZE_PER_RANK = 1_000_000


class MegatronEngine(Engine):
    """TP × PP × CP × DP training of a Llama; see `megabench.engines.base.Engine`."""

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.copies = optimizer_copies(config)
        self.groups = create_process_groups(config.layout, self.copies)
        # the sequence-parallel forward pass needs megatron-core's random state tracker
        model_parallel_cuda_manual_seed(config.seed)
        self.chunks = self._build_chunks()
        self.optimizer = build_optimizer(config, self.chunks, self._named_parameters(), self.groups)
        self._connect_schedule()
        self.loss_and_count = torch.zeros(2, dtype=torch.float64, device=device)

    @staticmethod
    def process_groups(config: ResolvedConfig) -> dict[str, dist.ProcessGroup]:
        created = create_process_groups(config.layout, optimizer_copies(config))
        return {axis: getattr(created, axis) for axis in FACTORS}

    def _build_chunks(self) -> list[DistributedDataParallel]:
        """Build the model chunks of this pipeline stage, with initial weights and gradient buffers."""
        run, layout = self.run, self.run.layout
        self.transformer_config = transformer_config(run)
        weights, stage = initial_weights(run, self.device), self.groups.pp.rank()
        chunks = []
        for number in range(layout.vp):
            is_first = number == 0 and stage == 0
            is_last = number == layout.vp - 1 and stage == layout.pp - 1
            layers = chunk_layers(run)[stage][number]
            chunk = ParallelLlama(self.transformer_config, run, self.groups, layers, is_first, is_last, number)
            load_weights(chunk, weights, run, self.groups.tp.rank())
            chunk.to(self.device)
            chunks.append(self._replicated(chunk, number))
        return chunks

    def _replicated(self, chunk: ParallelLlama, number: int) -> DistributedDataParallel:
        """Return a chunk with gradient buffers that are reduced over its replicas."""
        # overlap communication with compute if there are several replicas
        overlap = self.groups.dp_cp.size() > 1
        # Only the first chunk of the first stage needs buckets to overlap its communication with compute. The reduction
        # of the others overlaps with the backward pass of earlier stages and chunks.
        has_buckets = overlap and number == 0 and self.groups.pp.rank() == 0
        bucket_size = max(BUCKET_SIZE, BUCKET_SIZE_PER_RANK * self.groups.dp.size())
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self.run.grad_dtype == "fp32",
            use_distributed_optimizer=True,
            num_distributed_optimizer_instances=self.copies,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
            bucket_size=bucket_size if overlap else None,  # megatron-core requires equal values for all chunks
        )
        layout = buffer_layout(
            list(chunk.parameters()), bucket_size if has_buckets else None, self.groups.intra_dp_cp.size(), config
        )
        return DistributedDataParallel(
            self.transformer_config,
            config,
            chunk,
            disable_bucketing=not has_buckets,
            pg_collection=self.groups,
            **layout,
        )

    def _connect_schedule(self) -> None:
        """Set the schedule's callbacks: loss scaling, gradient reduction, and no reduction between micro-batches."""
        config = self.transformer_config
        config.grad_scale_func = self.optimizer.scale_loss if self.run.policy.scales_loss else None
        config.finalize_model_grads_func = self._finalize_gradients
        if self.chunks[0].ddp_config.overlap_grad_reduce:
            no_syncs = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
        self.forward_backward = get_forward_backward_func()

    def _finalize_gradients(self, chunks: list[DistributedDataParallel], num_tokens: Tensor, **settings: Any) -> None:
        """Sum gradients over the ranks that share parameters.

        megatron-core would read all gradients again to divide them by `num_tokens`. `_loss` has already divided the
        losses, in fp16 by all factors except the number of replicas.
        """
        finalize_model_grads(chunks, None, **settings)
        if self.run.policy.scales_loss:
            for chunk in chunks:
                chunk.scale_gradients(1 / self.groups.dp_cp.size())

    def accumulate(self, batches: Sequence[Batch]) -> None:
        assert len(batches) == self.run.num_micro_batches, "each loss is divided by that number"
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.loss_and_count = self._run_schedule(batches, forward_only=False)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        layout = self.run.layout
        if layout.vp > 1 and len(batches) % layout.pp:
            raise ValueError(
                f"evaluate got {len(batches)} micro-batches. With vp={layout.vp}, pass a multiple of pp={layout.pp}."
            )
        for chunk in self.chunks:
            chunk.eval()
        config = self.transformer_config
        # without backward passes, a pipeline schedule would enter this context and not leave it
        no_sync, config.no_sync_func = config.no_sync_func, None
        totals = self._run_schedule(batches, forward_only=True)
        config.no_sync_func = no_sync
        for chunk in self.chunks:
            chunk.train()
        dist.all_reduce(totals)
        loss_sum, loss_count = totals.tolist()
        return float(loss_sum / loss_count)

    def _run_schedule(self, batches: Sequence[Batch], forward_only: bool) -> Tensor:
        """Run the schedule, and return the sum of this rank's losses and their number. Both are 0 if it computes none.

        A loss is the mean over the tokens of a micro-batch.
        """
        reports = self.forward_backward(
            forward_step_func=self._forward_step,
            # each model chunk reads the micro-batches from the beginning
            data_iterator=[iter(batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=self.run.seq_length,
            micro_batch_size=self.run.micro_batch,
            forward_only=forward_only,
        )
        for chunk in self.chunks:
            forget_casts(chunk)
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        for report in reports:  # only the last pipeline stage has losses
            totals += report
        return totals

    def _forward_step(self, batches: Iterator[Batch], model: DistributedDataParallel) -> tuple[Tensor, Any]:
        batch, cp = next(batches).to(self.device), self.groups.cp
        inputs, labels = (zigzag_slice(part, cp.size(), cp.rank()) for part in (batch.inputs, batch.labels))
        # the model computes rotary positions and the causal mask itself
        output = model(input_ids=inputs, position_ids=None, attention_mask=None, labels=labels)
        return output, self._loss

    def _loss(self, token_losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convert losses [B, S] into (the loss to differentiate, its token count, the loss to report).

        Sums of token losses would overflow under fp16's loss scale.
        """
        loss = token_losses.mean()
        count = torch.ones((), dtype=torch.int, device=self.device)
        report = torch.stack([loss.detach().double(), count.double()])
        return loss * loss_factor(self.run, self.groups), count, report

    @torch.no_grad()
    def update(self, learning_rate: float) -> StepResult:
        skipped = self.optimizer.prepare_grads()
        for_norm = gradients_for_norm(self.optimizer)
        mine = squared_norm(for_norm).to(self.device)
        # All ranks of a tensor-parallel group report the same losses, which does not change the mean. The gradient
        # shards of all ranks contain the whole gradient as many times as there are copies of the optimizer state.
        totals = torch.cat([self.loss_and_count, mine.reshape(1) / self.copies])
        dist.all_reduce(totals)
        loss_sum, loss_count, squared_norm_sum = totals.tolist()
        grad_norm = squared_norm_sum**0.5
        # DeepSpeed also skips the update in this case, in any precision
        skipped = skipped or not math.isfinite(grad_norm)
        if not skipped:
            self._clip(grad_norm)
            set_learning_rate(self.optimizer, learning_rate)
            self.optimizer.step_with_ready_grads()
        return self.step_result(loss_sum / loss_count, grad_norm, skipped)

    def _clip(self, grad_norm: float) -> None:
        if self.run.clip_grad and grad_norm > self.run.clip_grad:
            grads = [param.grad for param in self.optimizer.get_parameters() if param.grad is not None]
            torch._foreach_mul_(grads, self.run.clip_grad / (grad_norm + 1e-6))

    def training_state(self) -> TrainingState:
        return TrainingState(
            shards=list(shards(self._named_parameters(), self.optimizer, self.run, self.groups)),
            optimizer_step=optimizer_step(self.optimizer),
            loss_scale=loss_scale_of(self.optimizer),
        )

    def compute_weights(self) -> list[StateShard]:
        if not self.run.policy.has_masters:
            return []
        run, tp_rank = self.run, self.groups.tp.rank()
        cuts = {name: shard(name, run.shape, run.layout.tp, tp_rank) for name, _ in self._named_parameters()}
        return [
            StateShard("weight", blocks_of(cuts[name], 0, weight.numel()), weight.detach().view(-1))
            for name, weight in self._named_parameters()
        ]

    @property
    def optimizer_groups(self) -> Sequence[Mapping[str, Any]]:
        groups: Sequence[Mapping[str, Any]] = self.optimizer.optimizer.param_groups
        return groups

    def restored(self, optimizer_step: int, loss_scale: dict[str, float] | None) -> None:
        set_optimizer_step(self.optimizer, optimizer_step)
        set_loss_scale(self.optimizer, loss_scale)
        self.optimizer._copy_main_params_to_model_params()
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)

    @property
    def rank_loss(self) -> float:
        loss_sum, count = self.loss_and_count.tolist()
        return loss_sum / count if count else 0.0

    def full_tensors(self, kind: TensorKind) -> Iterator[tuple[str, Tensor]]:
        read = self._weights if kind == "weights" else self._gradients
        yield from full_tensors(read(), self.run, self.groups, self.device)

    def _named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for chunk in self.chunks:
            model: ParallelLlama = chunk.module
            for name, parameter in model.named_parameters():
                yield whole_model_name(model, name), parameter

    def _weights(self) -> dict[str, Tensor]:
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                # without this, megatron-core gathers the updated shards only before the next forward pass
                chunk.disable_forward_pre_hook()
                chunk.enable_forward_pre_hook()
        return {name: parameter.detach() for name, parameter in self._named_parameters()}

    def _gradients(self) -> dict[str, Tensor]:
        group = self.groups.intra_dp_cp
        for chunk in self.chunks:
            for buffer in chunk.buffers:
                for bucket in buffer.buckets:
                    # after the reduce-scatter, each rank has only its own part of the gradient
                    parts = list(bucket.grad_data.chunk(group.size()))
                    dist.all_gather(parts, parts[group.rank()].clone(), group=group)
        scale = self.optimizer.get_loss_scale()
        return {
            name: parameter.main_grad.float() / scale  # type: ignore[attr-defined]
            for name, parameter in self._named_parameters()
        }

    @property
    def kernels(self) -> dict[str, str]:
        adam = "apex FusedAdam" if self.run.device == "cuda" and apex_adam() else "torch fused AdamW"
        return kernels.names_for_megatron(self.run) | {
            "optimizer": adam if self.run.optimizer == "adamw" else "torch SGD",
        }

    @property
    def kernel_traits(self) -> KernelTraits:
        return kernels.traits_for_megatron(self.run)
