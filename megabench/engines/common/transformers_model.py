"""Construction, loss, optimizer and initial weights of transformers models, shared by several engines."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megabench.checkpoint.shards import StateShard, blocks_of, whole
from megabench.config import ResolvedConfig
from megabench.data.batch import Batch
from megabench.engines.base import EngineError
from megabench.engines.common.initial_weights import initial_weights
from megabench.engines.common.kernels import patch_transformers
from megabench.engines.common.optim import MuonWithAdamW, NamedParameter, parameter_groups
from megabench.engines.common.transformers_blocks import LossHead
from megabench.models.causal_lm import UnsupportedModelError, build_model
from megabench.models.hugging_face import transformers_config
from megabench.models.mapping import hidden_matrices, stored_shapes
from megabench.models.weights import read_flat
from megabench.runtime.device import DTYPES


def model_config(run: ResolvedConfig) -> PreTrainedConfig:
    """Return the transformers configuration of a run's model, after patching the kernels."""
    patch_transformers(run)
    return transformers_config(run.shape)


@contextmanager
def default_dtype(run: ResolvedConfig) -> Iterator[None]:
    """Create tensors without a given dtype in the training dtype, as transformers does when it loads a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[run.precision])
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build_on_meta(config: PreTrainedConfig, run: ResolvedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model whose parameters are in `dtype` on the meta device.

    Buffers are on CPU, with the values and dtypes of transformers: some layers multiply them with activations.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            empty = torch.empty_like(parameter, dtype=dtype, device="meta")
            module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)

    with default_dtype(run), patch.object(nn.Module, "register_parameter", register_on_meta):
        return build_model(config)


def materialize(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate uninitialized memory for the parameters of a model from `build_on_meta`. Its buffers stay unchanged."""
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    model.to_empty(device=device)
    for module, values in buffers:
        module._buffers.update(values)


def prepare(model: PreTrainedModel, run: ResolvedConfig, device: torch.device) -> None:
    """Prepare a model for training after its parameters were allocated, and move its buffers to `device`."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    model.tie_weights()  # moving a model between devices separates tied weights
    if run.recompute == "full":
        if not model.supports_gradient_checkpointing:
            raise UnsupportedModelError(
                f"recompute=full is not possible with {run.model}, because transformers cannot recompute the layers of "
                f"{type(model).__name__}. Use recompute=none."
            )
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


def mean_loss(wrapped: nn.Module, model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the mean cross-entropy over all S labels of a micro-batch. transformers' label shift would lose one label.

    `wrapped` is the engine's wrapper of `model`.
    """
    head = model.get_output_embeddings()
    if isinstance(head, LossHead):
        head.labels = batch.labels
        loss: Tensor = wrapped(input_ids=batch.inputs).logits
        return loss
    logits = wrapped(input_ids=batch.inputs).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten())


def home(offload: str, device: torch.device) -> torch.device:
    """Return the device of the weights between steps, which is `device`, or the CPU if all state is offloaded."""
    return torch.device("cpu") if offload == "all" else device


class InitialValues:
    """The initial values of a run's parameters, by ranges of elements, in fp32 on `device`.

    Values are cast on `device`, because torchrun gives each process only one CPU thread.
    """

    def __init__(self, run: ResolvedConfig, device: torch.device) -> None:
        self._weights, self._sizes = initial_weights(run, device), stored_shapes(run.shape)
        self._device = device

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return the elements `start` to `stop` of the flattened parameter, with zeros beyond its end."""
        return read_flat(self._weights, name, self._sizes, start, stop).to(self._device).float()


class PersistentBuffers:
    """The buffers that the files of a model contain. Training does not change them.

    The model has the buffers in the training dtype, and checkpoints contain them in fp32.
    """

    def __init__(self, model: PreTrainedModel, run: ResolvedConfig, values: InitialValues) -> None:
        self.model, self._dtype = model, DTYPES[run.precision]
        self._sizes = run.shape.foreign.buffers if run.shape.foreign else {}
        self._values = {name: values.read(name, 0, math.prod(size)) for name, size in self._sizes.items()}
        self.restored()

    def shards(self) -> list[StateShard]:
        """Return the buffers as a part of the training state. Rank 0 saves them."""
        is_owner = dist.get_rank() == 0
        return [
            StateShard("weight", blocks_of(whole(name, size), 0, math.prod(size)), self._values[name], is_owner)
            for name, size in self._sizes.items()
        ]

    def restored(self) -> None:
        """Copy the values, which a checkpoint may have changed, to the model."""
        for name, values in self._values.items():
            buffer = self.model.get_buffer(name)
            buffer.data = values.view(buffer.shape).to(buffer.device, self._dtype)


def build_optimizer(run: ResolvedConfig, params: Iterable[NamedParameter]) -> torch.optim.Optimizer:
    """Return torch's optimizer of this rank's parameters."""
    params = list(params)
    groups = parameter_groups(run, params)
    match run.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, lr=run.lr, betas=run.betas, eps=run.eps, fused=True)
        case "sgd":
            return torch.optim.SGD(groups, lr=run.lr)
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=run.lr)
        case "muon":
            hidden = hidden_matrices(run.shape)
            matrices, others = (
                parameter_groups(run, [each for each in params if (each[0] in hidden) == is_hidden])
                for is_hidden in (True, False)
            )
            return MuonWithAdamW(matrices, others, lr=run.lr, betas=run.betas, eps=run.eps)
    raise EngineError(f"the optimizer {run.optimizer} is not implemented")
