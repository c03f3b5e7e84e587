"""The DDP engine: every rank has the whole transformers model, and gradients are all-reduced once per step.

Weights are fp32, and each layer casts them to the training dtype. Gradients are therefore accumulated and reduced in
fp32. torch's reducer overlaps the reduction with the backward pass.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from megabench.config import ResolvedConfig
from megabench.engines.base import TensorKind
from megabench.engines.common import transformers_blocks
from megabench.engines.common import transformers_model as shared
from megabench.engines.common.fp8 import forget_casts
from megabench.engines.common.fp8_linear import Fp8Linear
from megabench.engines.common.transformers_engine import Held, TransformersEngine
from megabench.runtime.device import DTYPES
from megabench.specs.ddp import POWERSGD_PLAIN_STEPS, DdpSettings


class DdpEngine(TransformersEngine):
    """Pure data parallelism with whole replicas; see `megabench.engines.base.Engine`."""

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.model = self._build_model()
        # The PowerSGD hook of one bucket blocks both threads of gloo, so a second bucket would cause a deadlock.
        own = DdpSettings.of(config)
        one_bucket = 10**6 if own.powersgd_rank and device.type == "cpu" else None
        self.wrapped = DistributedDataParallel(
            self.model,
            broadcast_buffers=False,
            init_sync=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=one_bucket,
        )
        if own.powersgd_rank:
            self.wrapped.register_comm_hook(_power_sgd(own.powersgd_rank, config.seed), powerSGD_hook)
        elif config.grad_dtype == "bf16":
            self.wrapped.register_comm_hook(None, _in_bf16)
        self.num_copies = dist.get_world_size()
        is_owner = dist.get_rank() == 0
        self._build_optimizer([Held(name, parameter, 0, is_owner) for name, parameter in self._named_parameters()])
        # PowerSGD counts its reductions
        self.may_reduce_early = not own.powersgd_rank

    def _build_model(self) -> PreTrainedModel:
        run, dtype = self.run, DTYPES[self.run.precision]
        model = shared.build_on_meta(shared.model_config(run), run, torch.float32)
        transformers_blocks.fuse(model, run)
        shared.materialize(model, self.device)
        shared.prepare(model, run, self.device)
        values = shared.InitialValues(run, self.device)
        self.buffers = shared.PersistentBuffers(model, run, values)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values.read(name, 0, parameter.numel()).to(dtype).view(parameter.shape))
        if DdpSettings.of(run).compile:
            # DDP's graph optimizer splits compiled graphs at bucket borders. Splitting a fused kernel fails.
            # Graphs of single blocks are short enough for reductions to overlap.
            torch._dynamo.config.optimize_ddp = False
            for block in transformers_blocks.blocks(model, run):
                block.compile()
        if dtype != torch.float32:
            for module in list(model.modules()):
                names = {name for name, _ in module.named_parameters(recurse=False)}
                if isinstance(module, Fp8Linear):
                    names -= {"weight"}  # the layer casts its weight itself
                for name in names:
                    parametrize.register_parametrization(module, name, _Cast(dtype), unsafe=True)
        return model

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super()._named_parameters():
            yield re.sub(r"parametrizations\.(\w+)\.original", r"\1", name), parameter

    def _start_accumulation(self, num_micro_batches: int) -> None:
        # Gradients stay in DDP's buckets and are accumulated there, so that no second copy exists. The first reduction
        # places gradients in the buckets. Reducing again does not change the result, because the mean of equal means is
        # the same mean.
        self.wrapped.zero_grad(set_to_none=num_micro_batches == 1)

    @contextmanager
    def _micro_batch(self, is_last: bool) -> Iterator[None]:
        reduces = is_last or self.may_reduce_early
        self.may_reduce_early = False
        with nullcontext() if reduces else self.wrapped.no_sync():
            yield

    def _finish_accumulation(self) -> None:
        forget_casts(self.model)

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        yield
        forget_casts(self.model)

    def full_tensors(self, kind: TensorKind) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._named_parameters():
            yield name, self._shown(name, parameter if kind == "weights" else parameter.grad, kind)


def _power_sgd(rank: int, seed: int) -> PowerSGDState:
    """Return the state of PowerSGD (arXiv 1905.13727) with error feedback, which starts after uncompressed steps."""
    return PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_PLAIN_STEPS, random_seed=seed
    )


class _Cast(nn.Module):
    """Cast a parameter to another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, weight: Tensor) -> Tensor:
        return weight.to(self.dtype)


def _in_bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Call torch's bf16 hook.

    Give the hook another name, because DDP refuses the name of the bf16 hook on gloo, although gloo can reduce bf16.
    """
    return bf16_compress_hook(group, bucket)  # type: ignore[arg-type]
