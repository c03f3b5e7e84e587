"""The one-process model that every layout is compared with: transformers' own, trained by torch's own optimizers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from megabench.config import ResolvedConfig
from megabench.data.batch import Batch
from megabench.engines.common.initial_weights import initial_weights
from megabench.models.causal_lm import build_model
from megabench.models.hugging_face import transformers_config
from megabench.models.mapping import hugging_face_shapes
from megabench.models.weights import read_flat


def muon_in_fp32(run: ResolvedConfig) -> AbstractContextManager[object]:
    """Let torch's Muon multiply in fp32: in bf16, it turns rounding into visible differences."""
    return patch.object(Tensor, "bfloat16", Tensor.float) if run.optimizer == "muon" else nullcontext()


GROUPS_WITHOUT_BETAS = "embed: lr_scale=0.1 weight_decay=0.5; norm: weight_decay=0.3; mlp: lr_scale=2"
PARAM_GROUPS = "embed: lr_scale=0.1 weight_decay=0.5; norm: weight_decay=0.3 beta1=0.5; mlp: lr_scale=2 beta2=0.8"


def hyper_parameters(run: ResolvedConfig, name: str, num_dims: int) -> dict[str, Any]:
    """What these groups mean, as plain conditions."""
    values: dict[str, Any] = {"lr_scale": 1.0, "weight_decay": run.weight_decay if num_dims > 1 else 0.0}
    if run.param_groups is None:
        return values
    assert run.param_groups in (PARAM_GROUPS, GROUPS_WITHOUT_BETAS)
    beta1, beta2 = run.betas
    betas: tuple[float, float] | None = None
    if "embed" in name:
        values |= {"lr_scale": 0.1, "weight_decay": 0.5}
    elif "norm" in name:
        values |= {"weight_decay": 0.3}
        betas = (0.5, beta2)
    elif "mlp" in name:
        values |= {"lr_scale": 2.0}
        betas = (beta1, 0.8)
    return values | ({"betas": betas} if betas and run.param_groups == PARAM_GROUPS else {})


class Reference:
    """Trains on whole global batches; gradients and weights by Hugging Face name."""

    def __init__(self, run: ResolvedConfig, device: torch.device) -> None:
        self.run = run
        self.device = device
        self.model = self.load().to(device)
        self.optimizers = self._optimizers()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        run, layers = self.run, self.run.shape.table.layer_prefix
        named = dict(self.model.named_parameters())
        groups = {name: {"params": [p], **hyper_parameters(run, name, p.ndim)} for name, p in named.items()}
        adam: dict[str, Any] = {"lr": run.lr, "betas": run.betas, "eps": run.eps}
        match run.optimizer:
            case "sgd":
                return [torch.optim.SGD(groups.values(), lr=run.lr)]
            case "adafactor":
                return [torch.optim.Adafactor(groups.values(), lr=run.lr)]
            case "muon":
                hidden = [name for name, p in named.items() if name.startswith(layers) and p.ndim == 2]
                matrices = [groups.pop(name) for name in hidden]
                muon = torch.optim.Muon(matrices, lr=run.lr, adjust_lr_fn="match_rms_adamw")
                return [muon, torch.optim.AdamW(groups.values(), **adam)]
        return [torch.optim.AdamW(groups.values(), **adam)]

    def load(self) -> torch.nn.Module:
        """The model with its initial weights in fp32."""
        model = build_model(transformers_config(self.run.shape)).float()
        weights = initial_weights(self.run, torch.device("cpu"))
        shapes = hugging_face_shapes(self.run.shape)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(read_flat(weights, name, shapes, 0, parameter.numel()).view(parameter.shape))
        return model

    def step(self, batches: Sequence[Batch], learning_rate: float) -> tuple[float, float, dict[str, Tensor]]:
        """One optimizer step: (loss, gradient norm before clipping, gradients before clipping)."""
        self.model.zero_grad()
        total = 0.0
        for batch in (batch.to(self.device) for batch in batches):
            logits = self.model(input_ids=batch.inputs).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()) / len(batches)
            loss.backward()
            total += loss.item()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip_grad or float("inf"))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group.get("lr_scale", 1.0)
            with muon_in_fp32(self.run):
                optimizer.step()
        return total, norm.item(), gradients

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}
