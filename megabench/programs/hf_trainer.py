"""transformers.Trainer as a trial. It trains in its own loop, as its users start it.

The study's weights, sequences and learning rates reach it through `from_pretrained`, a dataset and `create_scheduler`.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import init_distributed
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from megabench.checkpoint.shards import StateShard, TrainingState, blocks_of, whole
from megabench.config import ResolvedConfig
from megabench.data.source import TokenSource
from megabench.engines.base import EngineError, StepResult
from megabench.engines.common.kernels import PLAIN
from megabench.engines.common.transformers_engine import first_element, local_part
from megabench.engines.deepspeed.state import ZeroState
from megabench.models.hugging_face import transformers_config
from megabench.models.mapping import hugging_face_shapes
from megabench.programs.initial_model import initial_model
from megabench.programs.program import Follower, Program, plain_name, rate_factor, tensors_of
from megabench.record import KernelTraits
from megabench.runtime.device import DTYPES
from megabench.specs.deepspeed_json import merge
from megabench.specs.hf_trainer import REPLACED, recomputes_by_fsdp


class HfTrainer(Program):
    """transformers.Trainer; see `megabench.programs.program.Program`."""

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        super().__init__(config, device)
        files = config.spec.recorded(config.options)
        given, deepspeed = files["trainer_args"] or {}, files["deepspeed_config"]
        self._zero_stage = config.spec.stage_of(config.options) if deepspeed is not None else None
        folder = initial_model(config)
        if deepspeed is not None:
            init_distributed()  # accelerate calls it on GPUs only, and ZeRO-3 divides the weights among its ranks
        try:
            # under ZeRO-3, from_pretrained divides the weights if the arguments exist already
            self._arguments = TrainingArguments(**arguments(config, given, deepspeed))
        except (TypeError, ValueError) as error:
            raise EngineError(f"transformers refuses the arguments of the trial: {error}") from None
        found = self._arguments.world_size, max(1, self._arguments.n_gpu)
        if found != (config.world_size, 1):
            raise EngineError(
                f"transformers would use {found[0]} of {config.world_size} processes with {found[1]} devices each; "
                f"start one process per device with megabench compare or torchrun"
            )
        # DeepSpeed makes fp32 masters of 16-bit weights; the other programs compute in 16 bits with fp32 weights
        dtype = DTYPES[config.precision] if deepspeed is not None else torch.float32
        # engines train without dropout, which a directory may set
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, config=transformers_config(config.shape), dtype=dtype
        )
        self._uses_liger = bool(given.get("use_liger_kernel"))
        self._unused = sorted(REPLACED & given.keys())
        self._added = [name for name in _added(config) if deepspeed is not None and name not in deepspeed]
        self._loss = 0.0

    def train(self, source: TokenSource, follower: Follower) -> None:
        sequences = _Sequences(source, self.num_steps * self.run.global_batch)
        follow = _Follow(self, follower)
        try:
            self._trainer = _Trainer(
                self.run, model=self._model, args=self._arguments, train_dataset=sequences, callbacks=[follow]
            )
        except ImportError as error:
            raise EngineError(f"transformers.Trainer needs a library that is missing: {error}") from None
        self._trainer.train()

    def end_step(self, logs: Mapping[str, float]) -> StepResult:
        """Return the result of the step that transformers has logged."""
        self._loss = logs["loss"]
        skipped = self._trainer.accelerator.optimizer_step_was_skipped
        return self.step_result(logs["loss"], float(logs["grad_norm"]), skipped)

    def training_state(self) -> TrainingState:
        if zero := self._zero:
            return zero.read()
        return TrainingState(list(self._shards()), optimizer_step=self._trainer.state.global_step, loss_scale=None)

    def _shards(self) -> Iterator[StateShard]:
        """Yield the tensors of torch's AdamW: whole ones under DDP, and this rank's parts under FSDP2."""
        shapes = hugging_face_shapes(self.run.shape)
        model = self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped, keep_torch_compile=False)
        for wrapped_name, parameter in model.named_parameters():
            name = plain_name(wrapped_name)
            is_part = isinstance(parameter, DTensor)
            first = first_element(parameter) if is_part else 0
            for kind, values in tensors_of(parameter, self._optimizer).items():
                mine = local_part(values) if is_part else values.detach()
                blocks = blocks_of(whole(name, shapes[name]), first, first + mine.numel())
                yield StateShard(kind, blocks, mine.view(-1), is_owner=is_part or dist.get_rank() == 0)

    def compute_weights(self) -> list[StateShard]:
        return zero.compute_weights() if (zero := self._zero) else []

    @property
    def torch_groups(self) -> list[dict[str, Any]]:
        return zero.groups if (zero := self._zero) else self._optimizer.param_groups

    @property
    def _zero(self) -> ZeroState | None:
        """The state of DeepSpeed's engine, or None without DeepSpeed."""
        if self._zero_stage is None:
            return None
        return ZeroState(self._trainer.deepspeed, self._zero_stage, self.run)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        """torch's optimizer inside accelerate's."""
        wrapped: Any = self._trainer.optimizer
        optimizer: torch.optim.Optimizer = getattr(wrapped, "optimizer", wrapped)
        return optimizer

    @property
    def rank_loss(self) -> float:
        """The mean loss of all ranks, because transformers logs no other."""
        return self._loss

    @property
    def warnings(self) -> list[str]:
        said = {"arguments that a measured run replaces": self._unused, "added to the DeepSpeed JSON": self._added}
        return [f"{what}: {', '.join(names)}" for what, names in said.items() if names]

    @property
    def kernels(self) -> dict[str, str]:
        own = {"norm": "Liger", "rope": "Liger", "activation": "Liger", "cross_entropy": "Liger, in chunks"}
        attention = f"transformers {self._model.config._attn_implementation}"
        optimizer = type(self._optimizer).__name__
        return {**PLAIN, "attention": attention, **(own if self._uses_liger else {}), "optimizer": optimizer}

    @property
    def kernel_traits(self) -> KernelTraits:
        is_fused = self._uses_liger
        return KernelTraits(fused_norm=is_fused, fused_activation=is_fused, fused_loss=is_fused)


def arguments(run: ResolvedConfig, given: Mapping[str, Any], deepspeed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the TrainingArguments of a run: those of the user's file, and the settings of the run."""
    fixed: dict[str, Any] = {
        "output_dir": str((run.out or Path(".")) / "hf_trainer"),
        "per_device_train_batch_size": run.micro_batch,
        "gradient_accumulation_steps": run.num_micro_batches,
        "max_steps": run.steps + run.profile,
        "learning_rate": run.lr,
        "weight_decay": run.weight_decay,
        "adam_beta1": run.betas[0],
        "adam_beta2": run.betas[1],
        "adam_epsilon": run.eps,
        "max_grad_norm": run.clip_grad,
        "bf16": run.precision == "bf16",
        "fp16": run.precision == "fp16",
        "gradient_checkpointing": run.recompute == "full" and not recomputes_by_fsdp(given),
        "seed": run.seed % 2**32,
        "use_cpu": run.device == "cpu",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    if deepspeed is not None:
        fixed["deepspeed"] = merge(_added(run), dict(deepspeed))
    left_out = REPLACED | {"activation_checkpointing"}  # the other name of gradient_checkpointing
    return {name: value for name, value in given.items() if name not in left_out} | fixed


def _added(run: ResolvedConfig) -> dict[str, Any]:
    """Return the run's settings that a DeepSpeed JSON gets if it does not have them."""
    return {
        "data_types": {"grad_accum_dtype": run.grad_dtype},
        "communication_data_type": run.grad_dtype,
        "gradient_clipping": "auto",
    }


class _Sequences(Dataset[dict[str, Tensor]]):
    """The sequences of the study, in its order. Every label is the token that follows an input token."""

    def __init__(self, source: TokenSource, length: int) -> None:
        self._source, self._length = source, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._source.sequence(index)
        # with `shift_labels`, transformers' loss does not drop the last label
        return {"input_ids": tokens[:-1], "labels": tokens[1:], "shift_labels": tokens[1:]}


class _Trainer(Trainer):
    """transformers.Trainer with the order of the sequences and the learning rates of the run."""

    def __init__(self, run: ResolvedConfig, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._run = run

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, partial(rate_factor, self._run))
        return self.lr_scheduler


class _Follow(TrainerCallback):
    """Tells the follower about the steps."""

    def __init__(self, program: HfTrainer, follower: Follower) -> None:
        self._program, self._follower = program, follower

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._follower.ready()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._program.begin_step()
        self._follower.begin_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._follower.before_update()  # reads the learning rates of the update before
        self._rate = self._program.begin_update()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" not in logs:  # the summary at the end
            return
        if self._follower.end_step(self._program.end_step(logs), self._rate):
            control.should_training_stop = True
