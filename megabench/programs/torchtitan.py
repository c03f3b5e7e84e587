"""torchtitan's Llama 3 as a trial. It trains in its own loop, as its users start it.

The study's weights reach it as a Hugging Face checkpoint, its sequences, learning rates and weight decay through the
functions of a `TrainSpec`, and its other settings as the flags of torchtitan's command line.
"""

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import megabench.programs.torchtitan_on_cpu  # noqa: F401  # isort: skip
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.models.llama3 import get_train_spec
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer

from megabench.checkpoint.shards import Block, StateShard, TrainingState
from megabench.config import ResolvedConfig
from megabench.data.batch import micro_batches
from megabench.data.source import TokenSource
from megabench.engines.base import EngineError, StepResult
from megabench.engines.common.optim import parameter_groups
from megabench.engines.common.transformers_engine import local_part
from megabench.errors import one_line
from megabench.models.mapping import Piece
from megabench.models.shape import ModelShape
from megabench.parallel.layout import rank_groups
from megabench.programs.initial_model import initial_model
from megabench.programs.program import Follower, Program, plain_name, rate_factor, tensors_of
from megabench.record import KernelTraits
from megabench.specs.torchtitan import REPLACED, batch_of_pass, compiles, is_ddp, value, without_replaced

_NAME = "megabench"  # of the model, and of its only size
_LOAD_ONLY = ("--checkpoint.load_only", "--checkpoint.initial_load_in_hf")
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class Torchtitan(Program):
    """torchtitan's trainer; see `megabench.programs.program.Program`."""

    _trainer: "_Trainer"

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._config: Mapping[str, Any] = config.spec.recorded(config.options)["torchtitan_config"] or {}
        self._folder = initial_model(config)
        self._loss = 0.0
        table = Llama3StateDictAdapter(model_args(config.shape), None).from_hf_map
        self._names = {theirs: name for name, theirs in table.items()}

    @staticmethod
    def process_groups(config: ResolvedConfig) -> dict[str, dist.ProcessGroup]:
        """Return groups of the ranks that torchtitan's mesh groups, which orders ranks by pp, dp, cp and tp."""
        mine = {}
        for axis, groups in rank_groups(config.layout).items():
            for ranks in groups:
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    mine[axis] = group
        return mine

    def train(self, source: TokenSource, follower: Follower) -> None:
        def build_dataloader(dp_rank: int, **_: Any) -> _Batches:
            return _Batches(source, self.run, dp_rank, batch_of_pass(self.run, self._config))

        def build_metrics(job: JobConfig, dimensions: Any, *_: Any) -> MetricsProcessor:
            return _Metrics(job, dimensions, self, follower)

        spec = dataclasses.replace(
            get_train_spec(),
            model_args={_NAME: model_args(self.run.shape)},
            build_tokenizer_fn=None,
            build_dataloader_fn=build_dataloader,
            build_optimizers_fn=self._build_optimizers,
            build_loss_fn=self._build_loss,
            build_lr_schedulers_fn=self._build_schedulers,
            build_metrics_processor_fn=build_metrics,
        )
        register_train_spec(_NAME, spec)
        with tempfile.TemporaryDirectory() as folder:
            self._trainer = _Trainer(job_config(self.run, self._config, self._folder, Path(folder)), self, follower)
            self._trainer.optimizers.register_step_pre_hook(lambda *_: self._before_update(follower))
            self._trainer.train()
            self._trainer.close()

    def _before_update(self, follower: Follower) -> None:
        follower.before_update()  # reads the learning rates of the update before
        self.begin_update()

    @property
    def torch_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._trainer.optimizers.optimizers for group in optimizer.param_groups]

    def _build_optimizers(self, parts: list[torch.nn.Module], *arguments: Any) -> OptimizersContainer:
        """Build torchtitan's optimizers, with the parameter groups of the run."""
        container = build_optimizers(parts, *arguments)
        for optimizer, part in zip(container.optimizers, parts, strict=True):
            named = [(self._hugging_face_name(name), weight, weight.ndim) for name, weight in part.named_parameters()]
            optimizer.param_groups.clear()
            for group in parameter_groups(self.run, named):
                optimizer.add_param_group(group | {"lr": self.run.lr * group["lr_scale"]})
        return container

    def _build_loss(self, job: JobConfig, **arguments: Any) -> Callable[..., Tensor]:
        total = build_cross_entropy_loss(job, **arguments)
        return total if self._loss_factor == 1 else lambda *given: total(*given) * self._loss_factor

    @property
    def _loss_factor(self) -> float:
        """The factor that makes the gradients of torchtitan 0.2.2 those of the mean loss (docs/library-bugs.md).

        Under PP they are those of the sum over the tokens of a step, and under DDP each rank's are divided twice.
        """
        layout = self.run.layout
        if layout.pp > 1:
            return 1 / (self.run.global_batch * self.run.seq_length)
        return layout.data_parallel if is_ddp(layout, self._config) else 1.0

    def _build_schedulers(self, optimizers: OptimizersContainer, *_: Any) -> LRSchedulersContainer:
        return LRSchedulersContainer(optimizers, partial(rate_factor, self.run))

    def end_step(self, loss: float, grad_norm: float) -> StepResult:
        """Return the result of a step that torchtitan logs on this rank. Collective.

        Ranks of the last pipeline stage know the loss.
        """
        knows = not hasattr(self._trainer, "pp_has_last_stage") or self._trainer.pp_has_last_stage
        known = torch.tensor([loss if knows else 0.0, float(knows)], dtype=torch.float64, device=self.device)
        dist.all_reduce(known)
        self._loss = float(known[0] / known[1]) / self._loss_factor
        return self.step_result(self._loss, grad_norm, skipped=False)

    def stop(self) -> None:
        self._trainer.must_stop = True

    def training_state(self) -> TrainingState:
        return TrainingState(list(self._shards()), optimizer_step=self._trainer.step, loss_scale=None)

    def _shards(self) -> Iterator[StateShard]:
        for optimizer, part in zip(self._trainer.optimizers.optimizers, self._trainer.model_parts, strict=True):
            for name, parameter in part.named_parameters():
                for kind, values in tensors_of(parameter, optimizer).items():
                    blocks, mine = blocks_of(self._hugging_face_name(name), values, self.run.shape)
                    yield StateShard(kind, blocks, mine, is_owner=self._owns(values))

    def _owns(self, values: Tensor) -> bool:
        """Return whether this rank is the first of those that hold this part of a tensor."""
        if not isinstance(values, DTensor):
            return self.run.layout.data_parallel == 1 or dist.get_rank() == 0
        places = zip(values.placements, values.device_mesh.get_coordinate() or (), strict=True)
        return all(coordinate == 0 or not placement.is_replicate() for placement, coordinate in places)

    def _hugging_face_name(self, name: str) -> str:
        """Return the Hugging Face name of a parameter, by torchtitan's own table."""
        plain = plain_name(name)
        if not (layer := re.search(r"layers\.(\d+)\.", plain)):
            return self._names[plain]
        return self._names[plain.replace(layer.group(1), "{}", 1)].format(layer.group(1))

    @property
    def rank_loss(self) -> float:
        """The mean loss of all ranks, because torchtitan logs no other."""
        return self._loss

    @property
    def warnings(self) -> list[str]:
        unused = sorted(name for name in REPLACED if value(self._config, name) is not None)
        said = [f"settings that a measured run replaces: {', '.join(unused)}"] if unused else []
        if self._loss_factor != 1:
            said.append(
                f"the loss is multiplied by {self._loss_factor:g}, because torchtitan scales gradients otherwise"
            )
        return said

    @property
    def kernels(self) -> dict[str, str]:
        parts = dict.fromkeys(("norm", "rope", "activation"), self._maker("model"))
        optimizer = type(self._trainer.optimizers.optimizers[0]).__name__
        attention = "torch scaled_dot_product_attention"
        loss = f"{self._maker('loss')}, fp32 logits"
        return {**parts, "attention": attention, "cross_entropy": loss, "optimizer": optimizer}

    def _maker(self, component: str) -> str:
        return "torch.compile" if compiles(self._config, component) else "torch, unfused"

    @property
    def kernel_traits(self) -> KernelTraits:
        is_fused = compiles(self._config, "model")
        return KernelTraits(flash_attention=True, fused_norm=is_fused, fused_activation=is_fused, fused_loss=False)


class _Trainer(Trainer):
    """torchtitan's trainer, which tells the follower about the steps."""

    def __init__(self, job: JobConfig, program: Torchtitan, follower: Follower) -> None:
        super().__init__(job)
        self._program, self._follower = program, follower
        self.must_stop = False

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        if self.step == 1:
            self._follower.ready()  # torchtitan has loaded the weights
        self._program.begin_step()
        self._follower.begin_step()
        super().train_step(data_iterator)

    def should_continue_training(self) -> bool:
        return super().should_continue_training() and not self.must_stop


class _Metrics(MetricsProcessor):
    """torchtitan's metrics, which tell the follower about the end of each step."""

    def __init__(self, job: JobConfig, dimensions: Any, program: Torchtitan, follower: Follower) -> None:
        super().__init__(job, dimensions)
        self._program, self._follower = program, follower

    def should_log(self, step: int) -> bool:
        return True

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        assert extra_metrics is not None, "torchtitan passes the learning rate"
        result = self._program.end_step(global_avg_loss, grad_norm)
        if self._follower.end_step(result, extra_metrics["lr"]):
            self._program.stop()
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)


class _Batches(BaseDataLoader):
    """The batches of a data-parallel rank: inputs and labels [B, S] of `num_sequences` sequences."""

    def __init__(self, source: TokenSource, run: ResolvedConfig, dp_rank: int, num_sequences: int) -> None:
        self._source, self._run, self._dp_rank, self._num_sequences = source, run, dp_rank, num_sequences

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for step in count():
            batches = micro_batches(self._source, self._run, self._dp_rank, step)
            for tokens in torch.cat([batch.tokens for batch in batches]).split(self._num_sequences):
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torchtitan loads no state, because it does not resume."""


def job_config(run: ResolvedConfig, content: Mapping[str, Any], model: Path, folder: Path) -> JobConfig:
    """Return the job configuration: the user's settings that are not replaced, and the run's as flags.

    `content` is the user's TOML file. Files go to `folder`. Raises EngineError.
    """
    file = folder / "job.toml"
    file.write_text("\n".join(toml_lines(without_replaced(content))), encoding="utf-8")
    flags = [f"--{name}={given}" for name, given in settings(run, content, model, folder).items()]
    try:
        return ConfigManager().parse_args([f"--job.config_file={file}", *flags, "--checkpoint.enable", *_LOAD_ONLY])
    except (SystemExit, Exception) as error:
        raise EngineError(f"torchtitan refuses the settings of the trial: {one_line(error)}") from None


def toml_lines(content: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Yield the lines of a TOML file. Its strings, numbers, booleans and arrays of them are those of JSON."""
    tables = {name: found for name, found in content.items() if isinstance(found, Mapping)}
    if section:
        yield f"[{section}]"
    for name, found in content.items():
        if name not in tables:
            yield f"{name} = {json.dumps(found, ensure_ascii=False)}"
    for name, found in tables.items():
        yield from toml_lines(found, f"{section}.{name}" if section else name)


def settings(run: ResolvedConfig, content: Mapping[str, Any], model: Path, folder: Path) -> dict[str, Any]:
    """Return the settings of torchtitan that follow from the run, by their flags (torchtitan/config/job_config.py)."""
    layout = run.layout
    return {
        "job.dump_folder": folder,
        "model.name": _NAME,
        "model.flavor": _NAME,
        "model.hf_assets_path": model,
        "checkpoint.initial_load_path": model,
        "metrics.log_freq": 1,
        "training.steps": run.steps + run.profile,
        "training.seq_len": run.seq_length,
        "training.local_batch_size": batch_of_pass(run, content),
        "training.global_batch_size": run.global_batch,
        "training.max_norm": run.clip_grad,
        "training.mixed_precision_param": _DTYPES[run.policy.compute],
        "optimizer.lr": run.lr,
        "optimizer.beta1": run.betas[0],
        "optimizer.beta2": run.betas[1],
        "optimizer.eps": run.eps,
        "optimizer.weight_decay": run.weight_decay,
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.context_parallel_degree": layout.cp,
        "parallelism.pipeline_parallel_degree": layout.pp,
        "parallelism.pipeline_parallel_microbatch_size": run.micro_batch,
        "activation_checkpoint.mode": run.recompute,
        "debug.seed": run.seed,
    }


def model_args(shape: ModelShape) -> TransformerModelArgs:
    """Return torchtitan's description of a model of the Llama family."""
    scaling = shape.rope_scaling
    return TransformerModelArgs(
        dim=shape.hidden_size,
        n_layers=shape.num_layers,
        n_heads=shape.num_heads,
        n_kv_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        # torchtitan rounds ffn_dim_multiplier * int(8/3 * dim) up to a multiple of multiple_of
        multiple_of=shape.ffn_size,
        ffn_dim_multiplier=shape.ffn_size / (4 * shape.hidden_size),
        norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        rope_scaling_args=RoPEScalingArgs(
            scaling_factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
        )
        if scaling
        else RoPEScalingArgs(scaling_factor=1.0),
    )


def blocks_of(name: str, values: Tensor, shape: ModelShape) -> tuple[tuple[Block, ...], Tensor]:
    """Return the blocks of a Hugging Face tensor that this rank has, and their elements in this order, flat.

    torchtitan turns pairs of neighbouring rows of queries and keys, and Hugging Face pairs that are half a head apart.
    """
    mine, (num_rows, *columns), (first, *left) = values.detach(), values.shape, (0,) * values.ndim
    if isinstance(values, DTensor):
        mine = local_part(values)
        (num_rows, *columns), (first, *left) = compute_local_shape_and_global_offset(
            values.shape, values.device_mesh, values.placements
        )
    mine = getattr(mine, "_tensor", mine)  # inside a weight that torchao casts to fp8 when it is gathered
    span = (left[0], left[0] + columns[0]) if columns else None
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return (Block(Piece(name, (first, first + num_rows), span), 0),), mine.reshape(-1)
    blocks, parts, start = [], [], 0
    for row in range(first - first % shape.head_dim, first + num_rows, shape.head_dim):  # the first row of a head
        low, high = max(row, first), min(row + shape.head_dim, first + num_rows)
        for half in (0, 1):
            part = mine[low - first + half : high - first : 2]
            top = row + half * shape.head_dim // 2 + (low - row) // 2
            blocks.append(Block(Piece(name, (top, top + len(part)), span), start))
            parts.append(part)
            start += part.numel()
    return tuple(blocks), torch.cat([part.reshape(-1) for part in parts]) if parts else mine.reshape(-1)
