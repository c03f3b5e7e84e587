"""Compares the first two steps of an engine with transformers' own model, loaded and trained without megabench.

The reference stays in evaluation mode, which turns off every kind of dropout.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from megabench.config import ResolvedConfig
from megabench.data.batch import micro_batches
from megabench.data.source import open_source
from megabench.engines.build import build_engine
from megabench.errors import UserError
from tests import distributed
from tests.engines.equivalence import (
    ANY_MODEL,
    OPTIMIZERS,
    Trace,
    device_of,
    relative_difference,
    resolve,
    train_reference,
)
from tests.engines.reference import Reference

NUM_STEPS = 2
TOLERANCES = {"loss": 1e-5, "gradient norm": 1e-4, "weights": 1e-5}  # relative, fp32


class Outcome(NamedTuple):
    """What an engine does with a model; `detail` is the figures, the message of the UserError or the traceback."""

    kind: Literal["EQUAL", "DIFFERENT", "REFUSED", "CRASH"]
    detail: str


class Model:
    """A model in a directory. Its reference is computed when the first engine has accepted it, and then kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reference: Trace | None = None

    def outcome(self, world_size: int, **layout: Any) -> Outcome:
        """Train the model on `world_size` ranks of the pool, and compare rank 0 with the reference."""
        work: dict[str, Any] = {"model": str(self.folder), "num_layers": None, **OPTIMIZERS["adamw"]}
        try:
            run = resolve(world_size, **work, **layout)
            trace = distributed.run(_train, world_size, run)[0]
        except UserError as error:
            return Outcome("REFUSED", str(error))
        except Exception as error:
            return Outcome("CRASH", str(error))
        if isinstance(trace, str):
            return Outcome("REFUSED", trace)
        if not self._is_causal:
            return Outcome("DIFFERENT", "the engine trains a model whose logits depend on later tokens")
        if self._reference is None:
            self._reference = train_reference(resolve(1, engine=ANY_MODEL, **work), NUM_STEPS, _TransformersReference)
        return _compare(trace, self._reference)

    @cached_property
    def _is_causal(self) -> bool:
        tokens = torch.arange(100, 132).repeat(2, 1)
        tokens[1, -1] += 1
        with torch.no_grad():
            one, other = _load(self.folder)(input_ids=tokens).logits[:, :-1]
        return torch.allclose(one, other, atol=1e-5)


class _TransformersReference(Reference):
    def load(self) -> PreTrainedModel:
        return _load(Path(self.run.model))


def _load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.use_cache = False
    return model


def _train(run: ResolvedConfig) -> Trace | str:
    """Return what this rank's engine did, or the message with which it refuses the model."""
    try:
        engine = build_engine(run, device_of(run))
        source = open_source(run)
        dp_rank = run.layout.coordinates(dist.get_rank()).dp
        trace = Trace()
        for step in range(NUM_STEPS):
            result = engine.train_step(micro_batches(source, run, dp_rank, step), run.lr)
            trace.losses.append(result.loss)
            trace.grad_norms.append(result.grad_norm)
        trace.weights = dict(engine.full_tensors("weights"))
        return trace
    except UserError as error:
        return str(error)


def _compare(ours: Trace, theirs: Trace) -> Outcome:
    if names := ours.weights.keys() ^ theirs.weights.keys():
        return Outcome("DIFFERENT", f"parameters that only one of the two has: {', '.join(sorted(names))}")
    weights = {name: relative_difference(ours.weights[name], theirs.weights[name]) for name in theirs.weights}
    farthest = max(weights, key=lambda name: weights[name])
    found = {
        "loss": relative_difference(torch.tensor(ours.losses), torch.tensor(theirs.losses)),
        "gradient norm": relative_difference(torch.tensor(ours.grad_norms), torch.tensor(theirs.grad_norms)),
        "weights": weights[farthest],
    }
    is_equal = all(found[kind] < TOLERANCES[kind] for kind in found)
    figures = ", ".join(f"{kind} {difference:.1e}" for kind, difference in found.items())
    return Outcome("EQUAL" if is_equal else "DIFFERENT", f"{figures} ({farthest})")
