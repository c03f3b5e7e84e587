"""The FSDP2 engine: torch's fully_shard, with one unit per block and per untied embedding or output layer.

Each rank keeps fp32 shards of the weights. Units are gathered in the training dtype when they are needed, and weights
that are only multiplied in fp8 are gathered in fp8 (fp8_gather.py). Gradients are reduce-scattered in `grad_dtype`
after every micro-batch. If `shard_size` is smaller than the world size, the model is sharded inside groups of
`shard_size` neighbouring ranks and replicated over the groups (HSDP).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from megabench.config import ResolvedConfig
from megabench.engines.base import TensorKind
from megabench.engines.common import transformers_blocks
from megabench.engines.common import transformers_model as shared
from megabench.engines.common.fp8_linear import Fp8Linear
from megabench.engines.common.transformers_engine import Held, TransformersEngine, first_element, local_part
from megabench.engines.fsdp.fp8_gather import Fp8Shards
from megabench.runtime.device import DTYPES
from megabench.specs.fsdp import FsdpSettings


class FsdpEngine(TransformersEngine):
    """Pure data parallelism under FSDP2; see `megabench.engines.base.Engine`."""

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.own = FsdpSettings.of(config)
        self.model = self.wrapped = self._build_model()
        self.fp8_shards = self._fp8_shards()
        # the optimizer updates plain tensors, which are the local shards
        self.shards = {name: nn.Parameter(local_part(parameter)) for name, parameter in self.model.named_parameters()}
        shard_size = self.own.shard_size or dist.get_world_size()
        self.num_copies = dist.get_world_size() // shard_size
        is_owner = dist.get_rank() < shard_size  # only the first HSDP replica saves
        self._build_optimizer(
            [
                Held(name, self.shards[name], first_element(parameter), is_owner)
                for name, parameter in self.model.named_parameters()
            ]
        )

    def _build_model(self) -> PreTrainedModel:
        """Build the sharded model with its initial weights. No rank ever stores the whole model."""
        run = self.run
        model = shared.build_on_meta(shared.model_config(run), run, torch.float32)
        model.tie_weights()  # before FSDP2 shards the tied tensors, which it would otherwise shard separately
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[run.precision], reduce_dtype=DTYPES[run.grad_dtype])
        mesh = self._mesh()
        offload = CPUOffloadPolicy(pin_memory=run.device == "cuda") if self.own.offload == "all" else OffloadPolicy()
        transformers_blocks.fuse(model, run)
        blocks = transformers_blocks.blocks(model, run)
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        if run.shape.tied_embeddings:
            ends = []  # a tied weight belongs to the FSDP unit of the whole model
        for unit in [*blocks, *ends, model]:
            # The embedding and the output layer are not resharded: backward starts at the output layer and does not
            # gather the embedding.
            is_block = unit in blocks
            if self.own.compile and is_block:
                unit.compile()
            reshard = self.own.reshard_after_forward and is_block
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, offload_policy=offload)
        home = shared.home(self.own.offload, self.device)
        shared.materialize(model, home)
        shared.prepare(model, run, self.device)
        values = shared.InitialValues(run, home)
        self.buffers = shared.PersistentBuffers(model, run, values)
        for name, parameter in model.named_parameters():
            self._fill(name, parameter, values)
        return model

    def _fp8_shards(self) -> Fp8Shards | None:
        """Make FSDP2 gather the weights of fp8 products in fp8, if there are any.

        The recipe "bf16-gradients" multiplies with the bf16 weights in backward.
        """
        layers = [layer for layer in self.model.modules() if isinstance(layer, Fp8Linear)]
        weights = [layer.weight for layer in layers if not layer.has_bf16_gradients]
        return Fp8Shards(weights, DTYPES[self.run.precision], self.device) if weights else None

    @property
    def kernels(self) -> dict[str, str]:
        return super().kernels | ({"weight_gather": "fp8"} if self.fp8_shards else {})

    def _mesh(self) -> DeviceMesh:
        size = dist.get_world_size()
        inside = self.own.shard_size or size
        shape, names = ((size,), ("shard",)) if inside == size else ((size // inside, inside), ("replicate", "shard"))
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    @torch.no_grad()
    def _fill(self, name: str, parameter: nn.Parameter, values: shared.InitialValues) -> None:
        local, start = local_part(parameter), first_element(parameter)
        initial = values.read(name, start, start + local.numel())
        local.copy_(initial.to(DTYPES[self.run.precision]).view(local.shape))

    def _start_accumulation(self, num_micro_batches: int) -> None:
        self.model.zero_grad()
        self.optimizer.zero_grad()  # the gradient of a shard is a slice of the whole gradient
        if self.fp8_shards:
            self.fp8_shards.update_scales()

    @contextmanager
    def _micro_batch(self, is_last: bool) -> Iterator[None]:
        self.wrapped.set_requires_all_reduce(is_last)  # HSDP replicas reduce their gradients once per step
        yield

    def _gradients(self) -> list[Tensor]:
        grads = [local_part(grad) for grad in super()._gradients()]
        for shard, grad in zip(self.shards.values(), grads, strict=True):
            shard.grad = grad
        return grads

    def _squared_norm(self, grads: list[Tensor]) -> Tensor:
        if self.own.offload != "all":
            return super()._squared_norm(grads)
        # norms of single tensors on the device, which is faster than fp64 norms on CPU
        norms = [torch.linalg.vector_norm(grad.to(self.device)) for grad in grads]
        return torch.stack(norms).square().sum()

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        if self.fp8_shards:
            self.fp8_shards.update_scales()
        yield
        self._reshard()

    def _reshard(self) -> None:
        """Free the gathered weights, which FSDP2 otherwise frees in the backward pass.

        While a unit is gathered, `model.parameters()` yields its gathered weights instead of its shards. `zero_grad`
        would therefore keep the gradients of the shards. FSDP2 also lists the units in the order of the forward pass,
        and would prefetch from this list in the next backward pass.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
                state = module._get_fsdp_state()
                state._comm_ctx.post_forward_order.clear()
                if group := state._fsdp_param_group:
                    group._post_forward_indices.clear()

    def full_tensors(self, kind: TensorKind) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            tensor: Any = parameter if kind == "weights" else parameter.grad
            if tensor is not None:
                # NCCL cannot gather an offloaded shard, because the shard is in host memory
                tensor = tensor.detach().to(self.device).full_tensor()
            yield name, self._shown(name, tensor, kind)
