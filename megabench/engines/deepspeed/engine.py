"""The DeepSpeed engine, which trains the transformers model under ZeRO 0 to 3."""

import io
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedModel

from megabench.checkpoint.shards import StateShard
from megabench.config import ConfigError, ResolvedConfig
from megabench.data.batch import Batch
from megabench.engines.base import EngineError, StepResult, TensorKind
from megabench.engines.common import transformers_blocks
from megabench.engines.common import transformers_model as shared
from megabench.engines.common.fp8 import forget_casts
from megabench.engines.common.optim import NamedParameter, parameter_groups, set_learning_rate, squared_norm
from megabench.engines.common.transformers_engine import TransformersEngine
from megabench.engines.deepspeed.state import ZeroState
from megabench.models.causal_lm import build_model
from megabench.precision import INITIAL_LOSS_SCALE, LOSS_SCALE_HYSTERESIS, LOSS_SCALE_WINDOW
from megabench.specs.deepspeed import DeepSpeedSettings, reduce_bucket
from megabench.specs.deepspeed_json import merge, read_deepspeed_json

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_grad

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


class DeepSpeedEngine(TransformersEngine):
    """Pure data parallelism under ZeRO; see `megabench.engines.base.Engine`."""

    state: ZeroState

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.own = DeepSpeedSettings.of(config)
        self.settings = deepspeed_settings(config)
        self.zero_stage = self.settings["zero_optimization"]["stage"]
        if device.type == "cuda" or "LOCAL_RANK" not in os.environ:
            os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed selects the GPU with this number
        # avoid compiling a shared-memory op on CPU, which takes a minute and does not change the losses
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        if self.own.deepspeed_config:
            _check_settings(self.settings, self.own.deepspeed_config)
        self.model = self._build_model()
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        with redirect_stdout(io.StringIO()):  # suppress a dozen lines of memory reports per rank
            self.engine, *_ = deepspeed.initialize(
                model=self.model, optimizer=_optimizer_of(config, self.model), config=self.settings
            )
        self.wrapped = self.engine
        if self.zero_stage == 3:
            # hpZ copied the weights before the initial weights were loaded, so copy them again
            self.engine.optimizer.invalidate_secondary_tensor()
        if self.zero_stage == 0 and config.policy.compute == "bf16":
            _undo_first_step(self.engine.optimizer)
        # DeepSpeed casts buffers together with the weights, so restore them
        for name, buffer in self.model.named_buffers():
            buffer.data = buffers[name].to(self.device)
        self.state = ZeroState(self.engine, self.zero_stage, config)

    def _build_model(self) -> PreTrainedModel:
        """Build the transformers model with its initial weights.

        Under ZeRO-3, parameters are partitioned when they are created.
        """
        config = shared.model_config(self.run)  # zero.Init would partition the model that this call creates
        is_partitioned = self.zero_stage == 3
        with (
            self.device,
            shared.default_dtype(self.run),
            deepspeed.zero.Init(config_dict_or_path=self.settings, enabled=is_partitioned),
        ):
            model = build_model(config)
        # zero.Init casts the tensors that a constructor creates, such as rotary frequencies, to the training dtype
        for name, buffer in shared.build_on_meta(config, self.run, torch.float32).named_buffers():
            model.get_buffer(name).data = buffer.to(self.device)
        transformers_blocks.fuse(model, self.run)
        shared.prepare(model, self.run, self.device)
        if self.own.zero_leaf_layers:
            deepspeed.utils.set_z3_leaf_modules(
                model, [type(block) for block in transformers_blocks.blocks(model, self.run)]
            )
        values = shared.InitialValues(self.run, shared.home(self.own.offload, self.device))
        self.buffers = shared.PersistentBuffers(model, self.run, values)
        _load_initial_weights(model, values)
        return model

    @contextmanager
    def _micro_batch(self, is_last: bool) -> Iterator[None]:
        yield
        if not is_last:
            self.engine.step()  # before the last micro-batch, step() only counts micro-batches

    def _backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def _finish_accumulation(self) -> None:
        forget_casts(self.model)

    def update(self, learning_rate: float) -> StepResult:
        set_learning_rate(self.engine.optimizer, learning_rate)
        grad_norm = self._plain_grad_norm() if self.zero_stage == 0 else None
        skipped_before = self.engine.skipped_steps
        self.engine.step()
        skipped = self.engine.skipped_steps > skipped_before
        if grad_norm is None:
            norm = float(self.engine.get_global_grad_norm() or 0.0)
            grad_norm = norm if norm >= 0 else float("inf")  # DeepSpeed returns -1 for a non-finite norm
        total = self.loss.clone()
        dist.all_reduce(total)
        return self.step_result(total.item() / dist.get_world_size(), grad_norm, skipped)

    def _plain_grad_norm(self) -> float:
        """Return the gradient norm without ZeRO, where every rank has all reduced gradients."""
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return squared_norm(grads).sqrt().item()

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        yield
        forget_casts(self.model)

    def _evaluated_loss(self, batch: Batch) -> Tensor:
        if self.zero_stage < 3:
            return super()._evaluated_loss(batch)
        # DeepSpeed records the order of modules in the first step, and then prefetches weights in this order. It must
        # not record this pass, which has no backward pass.
        coordinator = self.engine.optimizer.parameter_offload.get_param_coordinator()
        has_no_order = coordinator.is_invalid_trace()
        loss = super()._evaluated_loss(batch)
        if has_no_order:
            coordinator._invalidate_trace()
        else:
            coordinator.reset_step()  # waits for the weights that were prefetched for a backward pass
        self._release_weights()
        return loss

    def _release_weights(self) -> None:
        """Free the gathered weights that ZeRO-3 keeps for a backward pass."""
        for parameter in self.model.parameters():
            if parameter.ds_status == ZeroParamStatus.AVAILABLE and not parameter.ds_persist:
                parameter.partition()

    def compute_weights(self) -> list[StateShard]:
        return self.state.compute_weights()

    @property
    def optimizer_groups(self) -> Sequence[Mapping[str, Any]]:
        return self.state.groups

    def full_tensors(self, kind: TensorKind) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if kind == "gradients":
                gradient = safe_get_full_grad(parameter)
                assert gradient is not None, f"{name} has no gradient; they exist between accumulate and update"
                yield name, gradient.detach().float().cpu().clone()
            else:
                with deepspeed.zero.GatheredParameters([parameter], enabled=self.zero_stage == 3):
                    yield name, parameter.detach().float().cpu().clone()

    @property
    def kernels(self) -> dict[str, str]:
        own = {"optimizer": "DeepSpeed CPUAdam"} if _uses_cpu_adam(self.run) else {}
        return super().kernels | own


def deepspeed_settings(run: ResolvedConfig) -> dict[str, Any]:
    """Return DeepSpeed's configuration for `run`. Settings of the user's file take precedence."""
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": run.num_micro_batches,
        "train_batch_size": run.global_batch,
        "gradient_clipping": run.clip_grad,
        "bf16": {"enabled": run.policy.compute == "bf16"},
        "fp16": _loss_scaling(run),
        "data_types": {"grad_accum_dtype": run.grad_dtype},
        "communication_data_type": run.grad_dtype,
        "zero_optimization": _zero_settings(run),
        "zero_allow_untested_optimizer": True,  # plain SGD
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's CPU optimizer supports only AdamW
        "steps_per_print": 2**31,
        # the throughput timer makes the host wait for the GPU in every micro-batch
        "timers": {"throughput": {"enabled": False}},
    }
    path = DeepSpeedSettings.of(run).deepspeed_config
    return merge(ours, read_deepspeed_json(path)) if path else ours


def _check_settings(settings: dict[str, Any], path: Path) -> None:
    """Raise ConfigError if DeepSpeed itself rejects the settings, which contain those of the user's file."""
    try:
        DeepSpeedConfig(settings)
    except (ValueError, TypeError, AssertionError) as error:
        problem = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        where = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"{path}: DeepSpeed rejects {where or 'the settings'}: {problem['msg']}") from None


def _loss_scaling(run: ResolvedConfig) -> dict[str, Any]:
    return {
        "enabled": run.policy.scales_loss,
        "initial_scale_power": int(math.log2(INITIAL_LOSS_SCALE)),
        "loss_scale_window": LOSS_SCALE_WINDOW,
        "hysteresis": LOSS_SCALE_HYSTERESIS,
    }


def _zero_settings(run: ResolvedConfig) -> dict[str, Any]:
    own = DeepSpeedSettings.of(run)
    zero: dict[str, Any] = {
        "stage": own.stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
    }
    if own.stage in (1, 2):
        zero["reduce_bucket_size"] = reduce_bucket(run.shape)
    host = {"device": "cpu", "pin_memory": run.device == "cuda"}
    if own.offload != "none":
        zero["offload_optimizer"] = host
    if own.offload == "all":
        zero["offload_param"] = host
    given = {
        "zero_hpz_partition_size": own.hpz_size,
        "stage3_prefetch_bucket_size": own.zero_prefetch,
        "stage3_param_persistence_threshold": own.zero_persistence,
    }
    if not own.reshard_after_forward:
        # ZeRO-3 keeps weights whose next use is less than this number of elements away. Up to three passes over all
        # other weights lie between a layer's forward and backward.
        far = 4 * run.shape.num_parameters
        given |= {"stage3_max_reuse_distance": far, "stage3_max_live_parameters": far}
    return zero | {key: value for key, value in given.items() if value is not None}


def _optimizer_of(run: ResolvedConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    # under ZeRO-3, the parameter is empty, and ds_shape has its shape
    params = [(name, p, len(getattr(p, "ds_shape", p.shape))) for name, p in model.named_parameters()]
    return _cpu_adam(run, params) if _uses_cpu_adam(run) else shared.build_optimizer(run, params)


@torch.no_grad()
def _undo_first_step(wrapper: Any) -> None:
    """Undo the step with which DeepSpeed allocates optimizer state without ZeRO, which decays the master weights."""
    wrapper.optimizer.state.clear()
    for weights, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            master.copy_(weight)


def _uses_cpu_adam(run: ResolvedConfig) -> bool:
    """Return whether DeepSpeed's CPUAdam is used.

    Without a GPU, torch's AdamW is used: its results are the same, and it needs no compiler.
    """
    return DeepSpeedSettings.of(run).offload != "none" and run.optimizer == "adamw" and run.device == "cuda"


def _cpu_adam(run: ResolvedConfig, params: list[NamedParameter]) -> torch.optim.Optimizer:
    """Return DeepSpeed's CPUAdam, which is compiled on first use."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if not (shutil.which("c++") or os.environ.get("CXX")):
        offload = DeepSpeedSettings.of(run).offload
        raise EngineError(f"offload={offload} needs a C++ compiler for DeepSpeed's CPU optimizer; install g++")
    groups = parameter_groups(run, params)
    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, lr=run.lr, betas=run.betas, eps=run.eps)
    return optimizer


@torch.no_grad()
def _load_initial_weights(model: torch.nn.Module, values: shared.InitialValues) -> None:
    """Load the initial weights into each parameter, or into this rank's partition under ZeRO-3."""
    for name, parameter in model.named_parameters():
        partition = getattr(parameter, "ds_tensor", None)
        if partition is None:
            parameter.copy_(values.read(name, 0, parameter.numel()).view(parameter.shape))
        else:  # ZeRO-3 splits the flattened, padded tensor into equal parts
            start = partition.numel() * dist.get_rank()
            partition.copy_(values.read(name, start, start + partition.numel()))
