"""The one-process model that every layout is compared with: transformers' own, trained by torch's own optimizers."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megabench.config import ResolvedConfig
from megabench.data.batch import Batch
from megabench.engines.common.initial import initial_weights
from megabench.models.causal_lm import build_model
from megabench.models.hugging_face import transformers_config
from megabench.models.mapping import hugging_face_shapes
from megabench.models.weights import read_flat


class Reference:
    """Trains on whole global batches; gradients and weights by Hugging Face name."""

    def __init__(self, run: ResolvedConfig, device: torch.device) -> None:
        self.run = run
        self.device = device
        self.model = build_model(transformers_config(run.shape)).float().to(device)
        weights = initial_weights(run, torch.device("cpu"))
        shapes = hugging_face_shapes(run.shape)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(read_flat(weights, name, shapes, 0, parameter.numel()).view(parameter.shape))
        groups = [
            {"params": [p for p in self.model.parameters() if p.ndim > 1], "weight_decay": run.weight_decay},
            {"params": [p for p in self.model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer: torch.optim.Optimizer
        if run.optimizer == "adafactor":
            self.optimizer = torch.optim.Adafactor(groups, lr=run.lr)
        elif run.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(groups, lr=run.lr)
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=run.lr, betas=run.betas, eps=run.eps)

    def step(self, batches: Sequence[Batch], learning_rate: float) -> tuple[float, float, dict[str, Tensor]]:
        """One optimizer step: (loss, gradient norm before clipping, gradients before clipping)."""
        self.optimizer.zero_grad()
        total = 0.0
        for batch in (batch.to(self.device) for batch in batches):
            logits = self.model(input_ids=batch.inputs).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()) / len(batches)
            loss.backward()
            total += loss.item()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip_grad or float("inf"))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return total, norm.item(), gradients

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}
