"""Base class of the engines that train transformers models, and the training state of those with torch's optimizers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from megabench.checkpoint.shards import StateShard, TrainingState, blocks_of, whole
from megabench.config import ResolvedConfig
from megabench.data.batch import Batch
from megabench.engines.base import Engine, StepResult, TensorKind
from megabench.engines.common import kernels
from megabench.engines.common.optim import LossScale, set_learning_rate, squared_norm
from megabench.engines.common.transformers_model import PersistentBuffers, build_optimizer, mean_loss
from megabench.models.causal_lm import UnsupportedModelError
from megabench.models.foreign import unused_words
from megabench.models.mapping import hidden_matrices, hugging_face_shapes
from megabench.optim.optimizers import OPTIMIZERS, StateKind
from megabench.record import KernelTraits
from megabench.runtime.device import DTYPES


class OptimizerState(Protocol):
    """The master weights of an engine and the state of its optimizer."""

    def read(self) -> TrainingState:
        """Return this rank's tensors, which training uses."""
        ...

    def restored(self, optimizer_step: int, loss_scale: dict[str, float] | None) -> None:
        """Continue from the state that was written into the tensors of `read`."""
        ...


@dataclass(frozen=True)
class Held:
    """The elements of a parameter from `first` on that this rank's optimizer updates.

    Only the owner of the elements saves them.
    """

    name: str
    values: nn.Parameter
    first: int
    is_owner: bool


def first_element(tensor: Any) -> int:
    """Return the position of this rank's first row of a DTensor, in elements of the whole tensor."""
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] * math.prod(tensor.shape[1:])


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor as a view."""
    local: Tensor = tensor.detach().to_local()
    return local


class ReplicaState:
    """The state of an engine whose torch optimizer updates fp32 tensors, each a range of a parameter's elements."""

    def __init__(
        self,
        run: ResolvedConfig,
        optimizer: torch.optim.Optimizer,
        held: Sequence[Held],
        loss_scale: LossScale | None,
    ) -> None:
        self._run, self._optimizer, self._held, self._loss_scale = run, optimizer, held, loss_scale

    def read(self) -> TrainingState:
        """Return this rank's tensors, which training uses."""
        shapes, hidden = hugging_face_shapes(self._run.shape), hidden_matrices(self._run.shape)
        shards = []
        for held in self._held:
            for kind, values in self._tensors(held.values, held.name in hidden).items():
                size = shapes[held.name]
                size = {"row_var": size[:-1], "col_var": size[:-2] + size[-1:]}.get(kind, size)
                blocks = blocks_of(whole(held.name, size), held.first, held.first + values.numel())
                shards.append(StateShard(kind, blocks, values.detach().view(-1), held.is_owner))
        steps = [int(state["step"]) for state in self._optimizer.state.values() if "step" in state]
        scale = self._loss_scale.state() if self._loss_scale else None
        return TrainingState(shards, optimizer_step=max(steps, default=0), loss_scale=scale)

    def restored(self, optimizer_step: int, loss_scale: dict[str, float] | None) -> None:
        """Continue from the step count `optimizer_step` and from fp16's loss scale."""
        if self._loss_scale and loss_scale:
            self._loss_scale.restore(loss_scale)
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(optimizer_step)

    def _tensors(self, parameter: nn.Parameter, is_hidden: bool) -> dict[StateKind, Tensor]:
        """Return the master weight and the state of its optimizer.

        The state is created if no step has created it yet, as in a resumed run.
        """
        state = self._optimizer.state[parameter]
        kinds = OPTIMIZERS[self._run.optimizer].state(tuple(parameter.shape), is_hidden)
        if not state and kinds:
            state |= {kind: parameter.detach().new_zeros(size) for kind, size in kinds.items()}
            state["step"] = torch.zeros((), device=parameter.device)
        tensors: dict[StateKind, Tensor] = {"weight": parameter}
        return tensors | {kind: values for kind, values in state.items() if kind != "step"}


class TransformersEngine(Engine):
    """Training and evaluation of a transformers model by data-parallel ranks; see `megabench.engines.base.Engine`.

    A subclass builds the model in `__init__`, sets the attributes below, and calls `_build_optimizer`. It overrides the
    methods in which its library differs. DeepSpeed has its own optimizer step, and needs no `optimizer`.

    `model` is the transformers model, `wrapped` the library's wrapper of the model, and `num_copies` the number of
    ranks that have each element of the gradients. `loss` is the sum of this rank's losses over the micro-batches of the
    last step, each divided by their number.
    """

    model: PreTrainedModel
    wrapped: Any
    buffers: PersistentBuffers
    optimizer: torch.optim.Optimizer
    state: OptimizerState
    num_copies: int
    loss_scale: LossScale | None = None

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.loss = torch.zeros((), device=device)

    def _build_optimizer(self, held: Sequence[Held]) -> None:
        """Build torch's optimizer of this rank's parts of the parameters, with its loss scale and training state."""
        shapes = hugging_face_shapes(self.run.shape)
        self.optimizer = build_optimizer(self.run, [(part.name, part.values, len(shapes[part.name])) for part in held])
        self.loss_scale = loss_scale_of(self.run)
        self.state = ReplicaState(self.run, self.optimizer, held, self.loss_scale)

    def accumulate(self, batches: Sequence[Batch]) -> None:
        self._start_accumulation(len(batches))
        self.loss.zero_()
        for number, batch in enumerate(batches):
            with self._micro_batch(is_last=number == len(batches) - 1):
                loss = mean_loss(self.wrapped, self.model, batch.to(self.device)) / len(batches)
                self._backward(loss)
            self.loss += loss.detach()
        self._finish_accumulation()

    def _start_accumulation(self, num_micro_batches: int) -> None:
        """Discard the gradients of the previous step."""

    @contextmanager
    def _micro_batch(self, is_last: bool) -> Iterator[None]:
        """Return the context of the forward and the backward pass of a micro-batch."""
        yield

    def _backward(self, loss: Tensor) -> None:
        """Run the backward pass of the loss of a micro-batch, which is divided by the number of micro-batches."""
        (loss * self.loss_scale.value if self.loss_scale else loss).backward()

    def _finish_accumulation(self) -> None:
        """Complete the gradients after the last micro-batch."""

    @torch.no_grad()
    def update(self, learning_rate: float) -> StepResult:
        grads = self._gradients()
        # all ranks together have each element of the gradient `num_copies` times
        totals = torch.stack([self.loss.double(), self._squared_norm(grads).double() / self.num_copies])
        dist.all_reduce(totals)
        loss, squared_norm = totals.tolist()
        return self._step_optimizer(grads, loss / dist.get_world_size(), squared_norm**0.5, learning_rate)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the model with their Hugging Face names."""
        yield from self.model.named_parameters()

    def _gradients(self) -> list[Tensor]:
        """Return this rank's part of the gradients, from which the optimizer updates the weights.

        Raises:
            UnsupportedModelError: A parameter has no gradient.
        """
        parameters = list(self._named_parameters())
        if unused := [name for name, parameter in parameters if parameter.grad is None]:
            raise UnsupportedModelError(unused_words(unused))
        return [parameter.grad for _, parameter in parameters if parameter.grad is not None]

    def _squared_norm(self, grads: list[Tensor]) -> Tensor:
        """Return the squared L2 norm of this rank's gradients on the device."""
        return squared_norm(grads).to(self.device)

    def _step_optimizer(self, grads: list[Tensor], loss: float, grad_norm: float, learning_rate: float) -> StepResult:
        """Clip the gradients of this rank by the global norm and step the optimizer, unless the norm is not finite.

        The gradients and their norm contain the factor `loss_scale` on entry.
        """
        is_finite = math.isfinite(grad_norm)
        factor = 1.0
        if self.loss_scale:
            factor = 1 / self.loss_scale.value
            grad_norm *= factor
            self.loss_scale.update(is_finite)
        if is_finite:
            if self.run.clip_grad and grad_norm > self.run.clip_grad:
                factor *= self.run.clip_grad / (grad_norm + 1e-6)
            if factor != 1.0:
                torch._foreach_mul_(grads, factor)
            set_learning_rate(self.optimizer, learning_rate)
            self.optimizer.step()
        return self.step_result(loss, grad_norm, skipped=not is_finite)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.eval()
        with self._evaluation():
            for batch in batches:
                total += self._evaluated_loss(batch)
        self.model.train()
        dist.all_reduce(total)
        return total.item() / (len(batches) * dist.get_world_size())

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """Return the context of forward passes without backward passes.

        On exit, the library must be in the state that it has between two steps.
        """
        yield

    def _evaluated_loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a micro-batch, computed without the library's wrapper."""
        return mean_loss(self.model, self.model, batch.to(self.device))

    def _shown(self, name: str, tensor: Tensor | None, kind: TensorKind) -> Tensor:
        """Return a whole tensor in fp32 for `full_tensors`. Weights are rounded to the dtype of the computation."""
        assert tensor is not None, f"{name} has no gradient; they exist between accumulate and update"
        dtype = DTYPES[self.run.precision] if kind == "weights" else torch.float32
        values = tensor.detach().to(dtype).float().cpu().clone()
        return values / self.loss_scale.value if self.loss_scale and kind == "gradients" else values

    def training_state(self) -> TrainingState:
        state = self.state.read()
        return replace(state, shards=state.shards + self.buffers.shards())

    @property
    def optimizer_groups(self) -> Sequence[Mapping[str, Any]]:
        return self.optimizer.param_groups

    def restored(self, optimizer_step: int, loss_scale: dict[str, float] | None) -> None:
        self.state.restored(optimizer_step, loss_scale)
        self.buffers.restored()

    @property
    def rank_loss(self) -> float:
        return self.loss.item()

    @property
    def kernels(self) -> dict[str, str]:
        return kernels.names_for_transformers(self.run) | {"optimizer": OPTIMIZERS[self.run.optimizer].implementation}

    @property
    def kernel_traits(self) -> KernelTraits:
        return kernels.traits_for_transformers(self.run)


def loss_scale_of(run: ResolvedConfig) -> LossScale | None:
    """Return the initial loss scale of fp16 training; None in other precisions."""
    return LossScale() if run.policy.scales_loss else None
