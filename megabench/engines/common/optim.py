"""Optimizers, their parameter groups and the loss scale, which several engines share."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._functional import adamw, sgd

from megabench.config import ResolvedConfig
from megabench.optim.optimizers import OPTIMIZERS
from megabench.optim.parameter_groups import HyperParameters
from megabench.precision import INITIAL_LOSS_SCALE, LOSS_SCALE_HYSTERESIS, LOSS_SCALE_WINDOW

# a parameter's Hugging Face name, this rank's part of it, and the number of dimensions of the whole parameter
NamedParameter = tuple[str, nn.Parameter, int]


def parameter_groups(run: ResolvedConfig, params: Iterable[NamedParameter]) -> list[dict[str, Any]]:
    """Return one parameter group for each set of hyper-parameters, as torch's optimizers take them."""
    members: dict[HyperParameters, list[nn.Parameter]] = {}
    for name, param, num_dims in params:
        members.setdefault(run.hyper_parameters(name, num_dims), []).append(param)
    has_betas = OPTIMIZERS[run.optimizer].has_betas
    return [
        {"params": params, "weight_decay": values.weight_decay, "lr_scale": values.lr_scale}
        | ({"betas": values.betas} if has_betas else {})
        for values, params in members.items()
    ]


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set the learning rate of the next step in all groups of an optimizer that `parameter_groups` returned."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_scale"]


def squared_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the squared L2 norm of all gradients together, fp64.

    On CPU, the squares are added in fp64, because torch's fp32 norm of many elements is inexact there: by 0.3% for the
    38 million elements of GPT-2's embedding.
    """
    if grads and grads[0].device.type == "cpu":
        return torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]).square().sum()
    return torch.nn.utils.get_total_norm(grads).double().square()


def apex_adam() -> type[torch.optim.Optimizer] | None:
    """Return FusedAdam of NVIDIA's apex if it is installed, else None. PyPI's `apex` is an unrelated package."""
    try:
        import amp_C  # noqa: F401  (apex's compiled kernels, without which FusedAdam cannot run)
        from apex.optimizers import FusedAdam
    except ImportError:
        return None
    return FusedAdam


@dataclass
class LossScale:
    """The dynamic loss scale of fp16 (arXiv 1710.03740), for engines whose library has none.

    The scale doubles after LOSS_SCALE_WINDOW finite steps, and halves at the second non-finite step.
    """

    value: float = INITIAL_LOSS_SCALE
    num_good: int = 0
    hysteresis: int = LOSS_SCALE_HYSTERESIS

    def update(self, is_finite: bool) -> None:
        """Count a step."""
        if is_finite:
            self.num_good += 1
            if self.num_good == LOSS_SCALE_WINDOW:
                self.value, self.num_good, self.hysteresis = self.value * 2, 0, LOSS_SCALE_HYSTERESIS
            return
        self.num_good = 0
        self.hysteresis -= 1
        if self.hysteresis <= 0:
            self.value = max(self.value / 2, 1.0)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {name: float(value) for name, value in asdict(self).items()}

    def restore(self, state: dict[str, float]) -> None:
        """Continue from `state`."""
        self.value, self.num_good = state["value"], int(state["num_good"])
        self.hysteresis = int(state["hysteresis"])


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon for hidden matrices, and AdamW for all other parameters.

    Muon's updates are scaled to the size of AdamW's (arXiv 2502.16982), so that both have one learning rate.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        muon = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)
        self._parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self._parts:
            part.step()


class GroupStepOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that store `step` in their parameter groups, as apex's optimizers do.

    megatron-core's distributed optimizer shards parameters and saves one step count for all of them. megatron-core
    cannot load the step counts of torch's optimizers, which are stored per parameter.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group["params"]:
                group["step"] = int(group.get("step", 0)) + 1
            if params:
                self._update(group, params, [param.grad for param in params])

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        raise NotImplementedError


class GroupStepAdamW(GroupStepOptimizer):
    """AdamW (arXiv 1711.05101) through torch's fused kernels, which exist for CPU and CUDA."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        # The fused kernel adds 1 to the given step number. The tensors are filled on the device, because copies would
        # make the host wait.
        steps = torch.full((len(params),), group["step"] - 1.0, device=params[0].device).unbind()
        adamw(
            params,
            grads,
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            list(steps),
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class GroupStepSGD(GroupStepOptimizer):
    """SGD without momentum, with torch's coupled weight decay."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        sgd(
            params,
            grads,
            [None] * len(params),
            weight_decay=group["weight_decay"],
            momentum=0.0,
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
