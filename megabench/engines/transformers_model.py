"""What the engines that train a transformers model share: its loss, its optimizer, its initial weights."""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megabench.config import ResolvedConfig
from megabench.data.batch import Batch
from megabench.engines.base import StepResult, TensorKind
from megabench.engines.cross_entropy import linear_cross_entropy
from megabench.engines.kernels import fuses_cross_entropy
from megabench.engines.optim import is_decayed
from megabench.models.init import initial_piece, standard_deviation
from megabench.models.mapping import Piece, hugging_face_shapes
from megabench.runtime.device import DTYPES


class LossHead(nn.Linear):
    """An output layer that ends in the loss: on [B, S, H] it returns the mean cross-entropy of `labels` [B, S].

    It is called by the model as any output layer, so that whoever shards the model gathers its weight.
    """

    labels: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden.flatten(0, 1), self.weight, self.labels.flatten())


def prepare(model: LlamaForCausalLM, run: ResolvedConfig, device: torch.device) -> None:
    """Gives a model that was built in another dtype, or on no device, what it must have before it trains."""
    # made in fp32 again: rotary frequencies in half precision are other frequencies
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config).to(device)
    if fuses_cross_entropy(run):
        head = model.get_output_embeddings()
        assert type(head) is nn.Linear and head.bias is None
        head.__class__ = LossHead  # the same weight under the same name
    if run.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


def mean_loss(wrapped: nn.Module, model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """The mean cross-entropy over all S labels of a micro-batch: transformers' own shift would lose one.

    `wrapped` is what an engine made of `model`.
    """
    head = model.get_output_embeddings()
    if isinstance(head, LossHead):
        head.labels = batch.labels
        loss: Tensor = wrapped(input_ids=batch.inputs).logits
        return loss
    logits = wrapped(input_ids=batch.inputs).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten())


def flat_values(name: str, start: int, stop: int, run: ResolvedConfig) -> Tensor:
    """Elements `start` to `stop` of a parameter's initial values, counted through its rows: fp32 on CPU, [stop−start].

    Elements beyond the parameter's end are zero.
    """
    shape = hugging_face_shapes(run.shape)[name]
    width = shape[1] if len(shape) == 2 else 1
    end = min(stop, shape[0] * width)
    values = torch.zeros(stop - start)
    if start < end:
        rows = start // width, -(-end // width)
        piece = Piece(name, rows, (0, width) if len(shape) == 2 else None)
        drawn = initial_piece(piece, shape, standard_deviation(name, run.shape), run.seed).flatten()
        values[: end - start] = drawn[start - rows[0] * width : end - rows[0] * width]
    return values


def build_optimizer(run: ResolvedConfig, params: Iterable[tuple[nn.Parameter, int]]) -> torch.optim.Optimizer:
    """torch's optimizer, as a single process would use it, over (parameter, its number of dims when whole) pairs."""
    decayed = [(param, is_decayed(num_dims)) for param, num_dims in params]
    groups = [
        {"params": [param for param, is_matrix in decayed if is_matrix], "weight_decay": run.weight_decay},
        {"params": [param for param, is_matrix in decayed if not is_matrix], "weight_decay": 0.0},
    ]
    if run.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=run.lr)
    return torch.optim.AdamW(groups, lr=run.lr, betas=run.betas, eps=run.eps, fused=True)


def finish_step(
    run: ResolvedConfig,
    optimizer: torch.optim.Optimizer,
    grads: list[Tensor],
    loss: float,
    grad_norm: float,
    learning_rate: float,
) -> StepResult:
    """Clips this rank's `grads` by the norm of all and steps the optimizer, unless the norm is not finite."""
    is_finite = math.isfinite(grad_norm)
    if is_finite:
        if run.clip_grad and grad_norm > run.clip_grad:
            torch._foreach_mul_(grads, run.clip_grad / (grad_norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    return StepResult(
        loss=loss,
        grad_norm=grad_norm if is_finite else float("inf"),
        num_tokens=run.global_batch * run.seq_length,
        skipped=not is_finite,
    )


def shown(name: str, tensor: Tensor | None, kind: TensorKind, run: ResolvedConfig) -> Tensor:
    """A whole fp32 tensor as `Engine.full_tensors` gives it: weights as the model computes with them."""
    assert tensor is not None, f"{name} has no gradient; they exist between accumulate and update"
    dtype = DTYPES[run.precision] if kind == "weights" else torch.float32
    return tensor.detach().to(dtype).float().cpu().clone()


def optimizer_name(run: ResolvedConfig) -> str:
    return "torch fused AdamW" if run.optimizer == "adamw" else "torch SGD"
