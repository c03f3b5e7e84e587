"""The Megatron-FSDP engine: NVIDIA's fully sharded data parallelism, with one unit per block.

Every rank holds fp32 shards of the weights and shards of the weights in the training dtype. If `shard_size` is smaller
than the world size, weights and gradients are sharded inside groups of `shard_size` neighbouring ranks, and only the
optimizer state is also sharded across the groups.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from megabench.config import ResolvedConfig
from megabench.data.batch import Batch
from megabench.engines.base import StepResult, TensorKind
from megabench.engines.common import transformers_blocks
from megabench.engines.common import transformers_model as shared
from megabench.engines.common.transformers_engine import Held, TransformersEngine
from megabench.runtime.device import DTYPES
from megabench.runtime.megatron_fsdp import prepare
from megabench.specs.megatron_fsdp import MegatronFsdpSettings

prepare()

from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model  # noqa: E402
from megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata  # noqa: E402


class MegatronFsdpEngine(TransformersEngine):
    """Pure data parallelism under Megatron-FSDP; see `megabench.engines.base.Engine`."""

    num_copies = 1

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.own = MegatronFsdpSettings.of(config)
        self.model = self._build_model()
        self.wrapped = self._shard(self.model)
        # DTensors of the fp32 weights, which the optimizer updates through plain tensors of the local shards
        self.weights = dict(self.wrapped.param_and_grad_buffer.optimizer_named_parameters)
        self.shards = {name: nn.Parameter(weight.detach().to_local()) for name, weight in self.weights.items()}
        self.first = {
            name: gather_and_compute_chunk_metadata(weight).offsets[0] * math.prod(weight.shape[1:])
            for name, weight in self.weights.items()
        }
        self._build_optimizer(
            [Held(name, shard, self.first[name], is_owner=True) for name, shard in self.shards.items()]
        )

    def _build_model(self) -> PreTrainedModel:
        """Build the model on the meta device. Megatron-FSDP then allocates, fills and shards one module at a time.

        A model with tied weights is allocated and filled here, because Megatron-FSDP would separate these weights.
        """
        run = self.run
        model = shared.build_on_meta(shared.model_config(run), run, DTYPES[run.precision])
        transformers_blocks.fuse(model, run)
        if run.shape.tied_embeddings:
            shared.materialize(model, self.device)
        shared.prepare(model, run, self.device)
        values = shared.InitialValues(run, self.device)
        self.buffers = shared.PersistentBuffers(model, run, values)
        if run.shape.tied_embeddings:
            _fill(model, "", values)
            return model
        # The library puts all weights outside of the blocks into one bucket. Without a bucket of its own, the output
        # layer's gradient would be kept until the end of the backward pass.
        model.get_output_embeddings().weight.shared_embedding = True
        for prefix, module in model.named_modules():
            if module._parameters:
                module.reset_parameters = partial(_fill, module, prefix, values, recurse=False)
        return model

    def _shard(self, model: PreTrainedModel) -> Any:
        # If a module has weights, the library allocates new memory for its buffers and loses their values.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        mesh = self._mesh()
        across = {}
        if mesh["outer"].size() > 1:
            group = mesh["outer", "shard"]._flatten("world").get_group()
            across = {"dp_outer_dim": "outer", "hybrid_fsdp_group": group, "outer_dp_sharding_strategy": "optim"}
        grad_dtype = DTYPES[self.run.grad_dtype]
        sharded = fully_shard_model(
            model,
            device_mesh=mesh,
            dp_shard_dim="shard",
            tp_dim="tp",
            fsdp_unit_modules=list({type(block) for block in transformers_blocks.blocks(model, self.run)}),
            zero_dp_strategy="optim_grads_params",
            device=self.device,
            init_model_with_meta_device=not self.run.shape.tied_embeddings,
            mixed_precision_policy=MixedPrecisionPolicy(
                main_params_dtype=torch.float32, main_grads_dtype=grad_dtype, grad_comm_dtype=grad_dtype
            ),
            sync_model_each_microbatch=False,
            calculate_per_token_loss=True,  # gradients are summed; `_finish_accumulation` divides them
            **across,
        )
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        return sharded

    def _mesh(self) -> DeviceMesh:
        size = dist.get_world_size()
        inside = self.own.shard_size or size
        return init_device_mesh(self.device.type, (size // inside, inside, 1), mesh_dim_names=("outer", "shard", "tp"))

    def _start_accumulation(self, num_micro_batches: int) -> None:
        self.optimizer.zero_grad()  # frees the shards' gradients if they are fp32 copies of bf16 ones
        self.wrapped.zero_grad_buffer()

    @contextmanager
    def _micro_batch(self, is_last: bool) -> Iterator[None]:
        # gradients are reduced across the groups of `shard_size` once per step
        self.wrapped.is_last_microbatch = is_last
        yield

    def _backward(self, loss: Tensor) -> None:
        self.wrapped.microbatch_count = 1  # gather the weights across the groups only in the first forward pass
        # The library's own hook calls `pre_backward` when it has the gradient of the last registered module's
        # output. The gradients of modules that run after this module would be reduced several times.
        self.wrapped.pre_backward()
        super()._backward(loss)
        self.wrapped.post_backward()

    def _finish_accumulation(self) -> None:
        self.wrapped.finish_grad_sync()
        for name, weight in self.weights.items():
            self.shards[name].grad = weight.grad.detach().to_local() if weight.grad is not None else None
        torch._foreach_mul_(self._gradients(), 1 / dist.get_world_size())

    def _gradients(self) -> list[Tensor]:
        return [shard.grad for shard in self.shards.values() if shard.grad is not None]

    @torch.no_grad()
    def update(self, learning_rate: float) -> StepResult:
        result = super().update(learning_rate)
        self.wrapped.install_optimized_model_weights()
        return result

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        self.wrapped._replace_param_with_raw_if_needed()
        yield
        # free the gathered weights and put the sharded ones into the model, as at the end of `finish_grad_sync`
        self.wrapped.synchronize_param_gather()
        self.wrapped.microbatch_count = 0

    def _evaluated_loss(self, batch: Batch) -> Tensor:
        loss = super()._evaluated_loss(batch)
        self.wrapped.microbatch_count = 1  # as in `_backward`
        return loss

    def restored(self, optimizer_step: int, loss_scale: dict[str, float] | None) -> None:
        super().restored(optimizer_step, loss_scale)
        self.wrapped.install_optimized_model_weights()

    def full_tensors(self, kind: TensorKind) -> Iterator[tuple[str, Tensor]]:
        for name, shard in self.shards.items():
            whole = torch.zeros(self.weights[name].shape, device=self.device)
            local = shard.detach() if kind == "weights" else shard.grad
            if local is not None:
                whole.view(-1)[self.first[name] : self.first[name] + local.numel()] = local.view(-1)
            dist.all_reduce(whole)
            yield name, self._shown(name, whole, kind)


@torch.no_grad()
def _fill(module: nn.Module, prefix: str, values: shared.InitialValues, recurse: bool = True) -> None:
    """Fill the parameters of a module, and of its submodules if `recurse`, with their initial values."""
    for name, parameter in module.named_parameters(prefix, recurse):
        parameter.copy_(values.read(name, 0, parameter.numel()).view(parameter.shape))
