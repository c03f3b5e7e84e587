"""Runs an engine on the ranks of the pool and the reference in this process, on the same work, and compares them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabench.config import ResolvedConfig, RunConfig
from megabench.data.batch import micro_batches
from megabench.data.source import open_source
from megabench.engines.build import build_engine
from megabench.specs.registry import ENGINES
from tests import distributed
from tests.engines.reference import Reference, muon_in_fp32
from tests.models import tiny  # noqa: F401  (its shapes become names of the catalogue)

# an engine that trains every family, on which a reference's configuration is resolved
ANY_MODEL = next(name for name, spec in ENGINES.items() if not spec.needs_blocks)
TOLERANCE = 1e-5  # relative L2 difference of any tensor, fp32
NUM_STEPS = 3
# what changes no result
ENGINE_OPTIONS = (
    "offload",
    "hpz_size",
    "zero_prefetch",
    "zero_persistence",
    "zero_leaf_layers",
    "compile",
    "tp_overlap",
)
BASE: dict[str, Any] = {
    "model": "llama-tiny",
    "num_layers": 4,
    "data": "synthetic",
    "seq_length": 32,
    "micro_batch": 1,
    "global_batch": 4,
    "precision": "fp32",
    "optimizer": "sgd",
    "lr": 0.05,
    "eps": 1e-3,  # with 1e-8 Adam turns rounding into visible differences
    "clip_grad": 0.5,  # below the norm, so that clipping is at work
    "device": "cpu",
}

Work = tuple[tuple[str, Any], ...]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "adamw": {"optimizer": "adamw", "lr": 1e-3},
}


@dataclass
class Trace:
    """What a few steps of training left behind."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step
    weights: dict[str, Tensor] = field(default_factory=dict)  # after the last
    evaluated: list[float] = field(default_factory=list)  # of each step's batches before the step, if asked


def train(run: ResolvedConfig, num_steps: int = NUM_STEPS, evaluates: bool = False) -> Trace:
    """Trains `run` on this rank; tensors are returned by rank 0 alone."""
    engine = build_engine(run, device_of(run))
    source = open_source(run)
    dp_rank = run.layout.coordinates(dist.get_rank()).dp
    trace = Trace()
    for step in range(num_steps):
        batches = micro_batches(source, run, dp_rank, step)
        if evaluates:
            trace.evaluated.append(engine.evaluate(batches))
        engine.accumulate(batches)
        if step == 0:
            trace.gradients = dict(engine.full_tensors("gradients"))
        with muon_in_fp32(run):
            result = engine.update(run.lr)
        trace.losses.append(result.loss)
        trace.grad_norms.append(result.grad_norm)
        trace.num_tokens.append(result.num_tokens)
    trace.weights = dict(engine.full_tensors("weights"))
    if dist.get_rank() != 0:
        trace.gradients, trace.weights = {}, {}
    return trace


def train_reference(
    run: ResolvedConfig, num_steps: int = NUM_STEPS, model: Callable[..., Reference] = Reference
) -> Trace:
    """The same in this process with transformers and torch's optimizer."""
    reference = model(run, device_of(run))
    source = open_source(run)
    trace = Trace()
    for step in range(num_steps):
        batches = micro_batches(source, run, 0, step)
        loss, norm, gradients = reference.step(batches, run.lr)
        trace.losses.append(loss)
        trace.grad_norms.append(norm)
        trace.num_tokens.append(run.global_batch * run.seq_length)
        trace.gradients = trace.gradients or gradients
    trace.weights = reference.weights()
    return trace


def device_of(run: ResolvedConfig) -> torch.device:
    """The device of this process."""
    return torch.device("cuda", torch.cuda.current_device()) if run.device == "cuda" else torch.device("cpu")


def resolve(world_size: int, **fields: Any) -> ResolvedConfig:
    fields = BASE | fields
    return RunConfig.parse(fields).resolve(world_size, fields["device"])


def reference_run(work: Work) -> ResolvedConfig:
    """The configuration with which the reference does `work`."""
    fields = dict(work)
    # which an engine may refuse and torch does not
    update = {name: fields.pop(name, BASE.get(name)) for name in ("optimizer", "param_groups")}
    return resolve(1, engine=ANY_MODEL, **fields).model_copy(update=update)


@lru_cache(maxsize=8)
def _cached_reference(work: Work) -> Trace:
    return train_reference(reference_run(work))


def work_of(**fields: Any) -> Work:
    """What the reference does of `fields`; the layout and engine play no part in it."""
    layout = ("engine", "tp", "pp", "vp", "cp", "zero_stage", "shard_size", "reshard_after_forward", "deepspeed_config")
    parallel = (*layout, "micro_batch", "recompute", "kernels", "keep_gathered", *ENGINE_OPTIONS)
    return tuple(sorted((k, v) for k, v in fields.items() if k not in parallel))


def reference_of(**fields: Any) -> Trace:
    """The reference trace of the work that `fields` name."""
    return _cached_reference(work_of(**fields))


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """‖ours − theirs‖ / ‖theirs‖."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours, theirs = (tensor.to(device).double() for tensor in (ours, theirs))
    return (torch.dist(ours, theirs) / theirs.norm()).item()


def differences(ours: Trace, theirs: Trace) -> dict[str, float]:
    """The relative difference of every tensor and figure, by name; a missing or extra tensor is an error."""
    found: dict[str, float] = {}
    for kind in ("gradients", "weights"):
        mine, other = getattr(ours, kind), getattr(theirs, kind)
        assert mine.keys() == other.keys(), mine.keys() ^ other.keys()
        found |= {f"{kind} {name}": relative_difference(mine[name], other[name]) for name in other}
    for kind in ("losses", "grad_norms"):
        mine, other = torch.tensor(getattr(ours, kind)), torch.tensor(getattr(theirs, kind))
        found[kind] = relative_difference(mine, other)
    return found


def worst(found: dict[str, float]) -> tuple[str, float]:
    name = max(found, key=lambda key: found[key] if found[key] == found[key] else float("inf"))
    return name, found[name]


def assert_equal_to_reference(world_size: int, job: Callable[..., Trace] = train, **fields: Any) -> None:
    """Runs `job` on every rank, and the reference here."""
    traces = distributed.run(job, world_size, resolve(world_size, **fields))
    assert all(trace.losses == traces[0].losses for trace in traces), "ranks report different losses"
    assert all(trace.grad_norms == traces[0].grad_norms for trace in traces), "ranks report different norms"
    reference = reference_of(**fields)
    assert traces[0].num_tokens == reference.num_tokens
    name, difference = worst(differences(traces[0], reference))
    assert difference < TOLERANCE, f"{name} differs by {difference:.1e}"
