"""Evaluation returns the loss of one process, and the training steps around it are the same to the last bit."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megabench.config import ResolvedConfig
from megabench.data.batch import micro_batches
from megabench.data.source import open_source
from megabench.engines.base import Engine
from megabench.engines.build import build_engine
from megabench.train.callbacks.comm_volume import SentBytes
from tests import distributed
from tests.engines.equivalence import NUM_STEPS, OPTIMIZERS, Work, device_of, reference_run, resolve, work_of
from tests.engines.fp8_reference import Fp8Reference, FusedFp8Reference, fp32_activations
from tests.engines.reference import Reference
from tests.exhaustive import with_representatives

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5  # relative difference of losses from those of one process
FP8_TOLERANCE = 1e-3  # after steps: a sum in another order moves some elements to the next fp8 value
OTHER_WEIGHTS = 4.0  # the factor by which other weights are larger
HELD_OUT = 1000  # the first step whose sequences are not used for training
FP8 = {"precision": "fp8", "num_layers": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"engine": "ddp"}),
    "ddp-recompute": (2, {"engine": "ddp", "recompute": "full"}),
    "ddp-reference-kernels": (2, {"engine": "ddp", "kernels": "reference"}),
    "ddp-gpt2": (2, {"engine": "ddp", "model": "gpt2-tiny", "num_layers": 2}),
    "ddp-bloom": (2, {"engine": "ddp", "model": "bloom-tiny", "num_layers": 2}),
    "ddp-compile": (2, {"engine": "ddp", "compile": True, "num_layers": 1}),
    "ddp-fp8": (2, {"engine": "ddp", **FP8}),
    **{f"zero{stage}": (2, {"engine": "deepspeed", "zero_stage": stage}) for stage in range(4)},
    "zero3-gpt2": (2, {"engine": "deepspeed", "model": "gpt2-tiny", "num_layers": 2, "zero_persistence": 100}),
    "zero3-recompute": (2, {"engine": "deepspeed", "recompute": "full", "zero_persistence": 100}),
    "zero3-offload": (2, {"engine": "deepspeed", "offload": "all", "zero_persistence": 100}),
    "zero3-hpz": (4, {"engine": "deepspeed", "hpz_size": 2, "zero_persistence": 100}),
    "zero3-tuned": (2, {"engine": "deepspeed", "zero_prefetch": 1000, "zero_persistence": 100}),
    "zero3-kept": (2, {"engine": "deepspeed", "reshard_after_forward": False, "zero_persistence": 100}),
    "zero3-leaf": (2, {"engine": "deepspeed", "zero_leaf_layers": True, "zero_prefetch": 1000}),
    "zero3-fp8": (2, {"engine": "deepspeed", **FP8}),
    "fsdp": (2, {"engine": "fsdp"}),
    "fsdp-gpt2": (2, {"engine": "fsdp", "model": "gpt2-tiny", "num_layers": 2}),
    "fsdp-recompute": (2, {"engine": "fsdp", "recompute": "full"}),
    "fsdp-hybrid": (4, {"engine": "fsdp", "shard_size": 2}),
    "fsdp-replicated": (2, {"engine": "fsdp", "shard_size": 1}),
    "fsdp-kept": (2, {"engine": "fsdp", "reshard_after_forward": False}),
    "fsdp-offload": (2, {"engine": "fsdp", "offload": "all"}),
    "fsdp-compile": (2, {"engine": "fsdp", "compile": True, "num_layers": 1}),
    "fsdp-fp8": (2, {"engine": "fsdp", **FP8}),
    "megatron-fsdp": (2, {"engine": "megatron_fsdp"}),
    "megatron-fsdp-gpt2": (2, {"engine": "megatron_fsdp", "model": "gpt2-tiny", "num_layers": 2}),
    "megatron-fsdp-recompute": (2, {"engine": "megatron_fsdp", "recompute": "full"}),
    "megatron-fsdp-hybrid": (4, {"engine": "megatron_fsdp", "shard_size": 2}),
    "megatron-fsdp-fp8": (2, {"engine": "megatron_fsdp", **FP8}),
    "dp2": (2, {}),
    "dp4-shards-of-2": (4, {"shard_size": 2}),
    "tp2": (2, {"tp": 2}),
    "tp2-recompute": (2, {"tp": 2, "recompute": "full"}),
    "tp2-selective": (2, {"tp": 2, "recompute": "selective"}),
    "tp2-reference-kernels": (2, {"tp": 2, "kernels": "reference", "model": "llama-odd"}),
    "tp2-fp8": (2, {"tp": 2, **FP8}),
    "pp2": (2, {"pp": 2}),
    "pp2-vp2": (2, {"pp": 2, "vp": 2}),
    "pp2-tied": (2, {"pp": 2, "model": "llama32-tiny"}),
    "cp2": (2, {"cp": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "pp2-vp2-dp2": (4, {"pp": 2, "vp": 2}),
    "tp2-pp2-dp2": (8, {"tp": 2, "pp": 2}),
}
IN_CI = (
    *("ddp", "ddp-gpt2", "ddp-fp8", "zero1", "zero3-tuned", "zero3-hpz"),
    *("fsdp", "fsdp-hybrid", "fsdp-kept", "fsdp-fp8", "megatron-fsdp", "megatron-fsdp-hybrid"),
    *("tp2-recompute", "tp2-fp8", "pp2-vp2-dp2", "cp2", "tp2-pp2-dp2"),
)


@dataclass
class Steps:
    """What a rank sees of some training steps, and the losses that it evaluates."""

    numbers: list[tuple[float, float, float]] = field(default_factory=list)  # loss, gradient norm, this rank's loss
    sent: list[int] = field(default_factory=list)  # bytes
    weights: dict[str, Tensor] = field(default_factory=dict)
    random_state: Tensor | None = None
    evaluated: list[float] = field(default_factory=list)  # before and after the steps, again, and with other weights


def train(run: ResolvedConfig, evaluates: bool) -> Steps:
    """Trains `run` on this rank, with evaluations before, between and after the steps if asked."""
    torch.manual_seed(run.seed)
    engine, source = build_engine(run, device_of(run)), open_source(run)
    dp_rank = run.layout.coordinates(dist.get_rank()).dp
    steps = Steps()

    def evaluate() -> None:
        if evaluates:
            steps.evaluated.append(engine.evaluate(micro_batches(source, run, dp_rank, HELD_OUT)))

    evaluate()
    for step in range(NUM_STEPS):
        with SentBytes(run.layout) as counted:
            result = engine.train_step(micro_batches(source, run, dp_rank, step), run.lr)
        steps.sent.append(counted.sent.total())
        evaluate()
        steps.numbers.append((result.loss, result.grad_norm, engine.rank_loss))
    steps.weights = dict(engine.full_tensors("weights"))
    evaluate()
    steps.random_state = torch.get_rng_state()
    load_other_weights(engine)
    evaluate()
    return steps


def load_other_weights(engine: Engine) -> None:
    """Writes into the training state, as loading a checkpoint does."""
    state = engine.training_state()
    for shard in state.shards:
        if shard.kind == "weight":
            shard.values.mul_(OTHER_WEIGHTS)
    engine.restored(state.optimizer_step, state.loss_scale)


def train_fp8(run: ResolvedConfig, evaluates: bool) -> Steps:
    with fp32_activations():
        return train(run, evaluates)


def train_with(mistake: str, run: ResolvedConfig, evaluates: bool) -> Steps:
    with MISTAKES[mistake][0]():
        return (train_fp8 if run.precision == "fp8" else train)(run, evaluates)


class EvaluatedReference:
    """The model of one process, and its losses before the first step and after each."""

    def __init__(self, model: Callable[..., Reference], work: Work) -> None:
        self._run = reference_run(work)
        self._source = open_source(self._run)
        with self._activations():
            self._reference = model(self._run, torch.device("cpu"))
            self.losses = [self._loss()]
            for step in range(NUM_STEPS):
                self._reference.step(micro_batches(self._source, self._run, 0, step), self._run.lr)
                self.losses.append(self._loss())

    def loss_of(self, weights: dict[str, Tensor], factor: float) -> float:
        """The loss with these weights, multiplied by `factor`. A run in fp8 has other weights than one process."""
        with self._activations(), torch.no_grad():
            for name, parameter in self._reference.model.named_parameters():
                parameter.copy_(weights[name] * factor)
            return self._loss()

    def _activations(self) -> AbstractContextManager[None]:
        return fp32_activations() if self._run.precision == "fp8" else nullcontext()

    @torch.no_grad()
    def _loss(self) -> float:
        tokens = torch.cat([batch.tokens for batch in micro_batches(self._source, self._run, 0, HELD_OUT)])
        logits = self._reference.model(input_ids=tokens[:, :-1]).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


cached_reference = lru_cache(maxsize=8)(EvaluatedReference)


def problems(world_size: int, fields: dict[str, Any], mistake: str | None = None) -> dict[str, Any]:
    """What differs without and with evaluations, on any rank, and evaluated losses that differ from one process."""
    fields = OPTIMIZERS["adamw"] | fields
    run = resolve(world_size, **fields)
    job = train_fp8 if run.precision == "fp8" else train
    without = distributed.run(job, world_size, run, False)
    ranks = distributed.run(partial(train_with, mistake) if mistake else job, world_size, run, True)
    found: dict[str, Any] = {}
    for before, after in zip(without, ranks, strict=True):
        if before.numbers != after.numbers:
            found["a training step"] = before.numbers, after.numbers
        assert before.weights.keys() == after.weights.keys()
        if names := [name for name, weight in before.weights.items() if not torch.equal(weight, after.weights[name])]:
            found["weights"] = names
        if not torch.equal(before.random_state, after.random_state):
            found["random numbers"] = None
        # megatron-core gathers updated weights in the first forward pass, and hpZ gathers from all ranks only there
        if not run.spec.needs_blocks and "hpz_size" not in fields and before.sent[1:] != after.sent[1:]:
            found["communication"] = before.sent, after.sent
        if after.evaluated != ranks[0].evaluated:
            found["evaluated losses of ranks"] = after.evaluated, ranks[0].evaluated
    kind = Reference
    if run.precision == "fp8":
        kind = FusedFp8Reference if run.spec.needs_blocks else Fp8Reference
    reference, weights = cached_reference(kind, work_of(**fields)), ranks[0].weights
    last = [reference.loss_of(weights, factor) for factor in (1.0, OTHER_WEIGHTS)]
    expected = torch.tensor([*reference.losses, *last])
    differences = (torch.tensor(ranks[0].evaluated) - expected).abs() / expected
    after_steps = FP8_TOLERANCE if run.precision == "fp8" else TOLERANCE
    if (differences > torch.tensor([TOLERANCE, *[after_steps] * NUM_STEPS, TOLERANCE, TOLERANCE])).any():
        found["evaluated losses"] = differences.tolist()
    return found


@pytest.mark.parametrize("layout", with_representatives(LAYOUTS, *IN_CI))
def test_evaluation(layout: str) -> None:
    world_size, fields = LAYOUTS[layout]
    assert problems(world_size, fields) == {}


def _gathered_weights() -> AbstractContextManager[Any]:
    """FSDP2 keeps the weights that it gathered for the evaluation after the first step."""
    from megabench.engines.fsdp.engine import FsdpEngine

    reshard, numbers = FsdpEngine._reshard, count(1)
    return patch.object(FsdpEngine, "_reshard", lambda engine: None if next(numbers) == 2 else reshard(engine))


def _fp8_casts() -> AbstractContextManager[Any]:
    """DDP evaluates with the fp8 casts of the weights before others were loaded."""
    from megabench.engines.ddp import engine

    return patch.object(engine, "forget_casts", lambda model: None)


def _kept_weights() -> AbstractContextManager[Any]:
    """ZeRO-3 evaluates with the weights that it gathered before others were loaded."""
    from megabench.engines.deepspeed.engine import DeepSpeedEngine

    return patch.object(DeepSpeedEngine, "_release_weights", lambda engine: None)


def _recorded_order() -> AbstractContextManager[Any]:
    """ZeRO-3 takes the order of modules in an evaluation for that of a step."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    return patch.object(PartitionedParameterCoordinator, "is_invalid_trace", lambda coordinator: False)


# the mistake, a layout, and what differs
MISTAKES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str, str]] = {
    "gathered weights": (_gathered_weights, "fsdp", "a training step"),
    "fp8 casts": (_fp8_casts, "ddp-fp8", "evaluated losses"),
    "kept weights": (_kept_weights, "zero3-kept", "evaluated losses"),
    "recorded order": (_recorded_order, "zero3-tuned", "communication"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(mistake: str) -> None:
    _, layout, problem = MISTAKES[mistake]
    assert problem in problems(*LAYOUTS[layout], mistake)


def evaluate_parts(run: ResolvedConfig) -> tuple[float, float]:
    """The loss of some micro-batches, evaluated together and one at a time."""
    engine, batches = build_engine(run, device_of(run)), micro_batches(open_source(run), run, 0, 0)
    together = engine.evaluate(batches)
    return together, sum(engine.evaluate([batch]) for batch in batches) / len(batches)


def test_a_pipeline_evaluates_any_number_of_micro_batches() -> None:
    for together, apart in distributed.run(evaluate_parts, 2, resolve(2, pp=2)):
        assert together == pytest.approx(apart, rel=1e-6)


def test_an_interleaved_pipeline_needs_a_multiple_of_its_stages() -> None:
    message = "ValueError: evaluate got 1 micro-batches. With vp=2, pass a multiple of pp=2."
    with pytest.raises(distributed.DistributedTestError, match=message):
        distributed.run(evaluate_parts, 2, resolve(2, pp=2, vp=2))
