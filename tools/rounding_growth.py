"""Measure how rounding and real errors grow in the losses of a run: `python -m tools.rounding_growth OUT.jsonl`.

Trains each setting on CPU several times: unchanged, with initial weights that differ in the last bit, and with an error
that parity must find. `tests/study/loss_curves.jsonl.gz` has most of these losses.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megabench.config import ResolvedConfig, RunConfig
from megabench.data.batch import Batch, micro_batches
from megabench.data.source import TokenSource, open_source
from megabench.engines.build import build_engine
from megabench.optim.schedules import learning_rate

_LLAMA = {
    "model": "llama-tiny", "num_layers": 2, "engine": "ddp", "precision": "fp32", "seq_length": 64, "micro_batch": 4,
    "global_batch": 8, "steps": 200, "device": "cpu",
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama, seed 7": {**_LLAMA, "seed": 7},
    "llama, 300 steps": {**_LLAMA, "seed": 3, "steps": 300},
    "llama, lr 1e-2": {**_LLAMA, "lr": 1e-2},
    "llama, lr 3e-4": {**_LLAMA, "lr": 3e-4},
    "qwen3": {**_LLAMA, "model": "qwen3-tiny"},
    "qwen3, 300 steps": {**_LLAMA, "model": "qwen3-tiny", "seed": 5, "steps": 300},
    "gpt2": {**_LLAMA, "model": "gpt2-tiny"},
    "llama, bf16": {**_LLAMA, "precision": "bf16"},
    "gpt2, bf16": {**_LLAMA, "model": "gpt2-tiny", "precision": "bf16"},
}
ROUNDING = ("unchanged", "last bit 1", "last bit 2")
ERRORS = (
    "lr 1% higher", "lr 50% higher", "no clipping", "no weight decay", "no decay from step 100",
    "other sequence at step 60", "unreduced gradient, first", "unreduced gradient, middle", "unreduced gradient, norm",
)  # fmt: skip

_WITHOUT = {"no clipping": {"clip_grad": 0.0}, "no weight decay": {"weight_decay": 0.0}}


def train(settings: dict[str, Any], change: str) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of a run with one change, which is a name in ROUNDING or ERRORS."""
    run = RunConfig.parse(settings).resolve(1, "cpu")
    run = run.model_copy(update=_WITHOUT.get(change))
    source, engine = open_source(run), build_engine(run, torch.device("cpu"))
    parameters: list[torch.nn.Parameter] = list(engine.model.parameters())  # type: ignore[attr-defined]
    if change.startswith("last bit"):
        _change_last_bits(parameters, seed=int(change.split()[-1]))
    results = []
    for step in range(run.steps):
        batches, learning_rate = _batches(run, source, step, change), _learning_rate(run, step, change)
        if change.startswith("unreduced gradient"):
            # one tensor gets the gradient of the first micro-batch only, as on a rank whose gradient is not reduced
            index = {"first": 0, "middle": len(parameters) // 2, "norm": -2}[change.split()[-1]]
            parameter = parameters[index]
            engine.accumulate(batches[:1])
            unreduced = parameter.grad.clone()  # type: ignore[union-attr]
            engine.accumulate(batches)
            parameter.grad.copy_(unreduced)  # type: ignore[union-attr]
            results.append(engine.update(learning_rate))
        else:
            results.append(engine.train_step(batches, learning_rate))
    return [result.loss for result in results], [result.grad_norm for result in results]


@torch.no_grad()
def _change_last_bits(parameters: Sequence[torch.nn.Parameter], seed: int) -> None:
    """Move each weight to the next number above or below."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        is_up = torch.rand(parameter.shape, generator=generator) < 0.5
        target = torch.where(is_up, math.inf, -math.inf)
        parameter.copy_(torch.nextafter(parameter, target))


def _batches(run: ResolvedConfig, source: TokenSource, step: int, change: str) -> list[Batch]:
    batches = micro_batches(source, run, 0, step)
    if change == "other sequence at step 60" and step == 59:
        tokens = batches[0].tokens.clone()
        tokens[0] = micro_batches(source, run, 0, step + 1000)[0].tokens[0]
        batches[0] = replace(batches[0], tokens=tokens)
    return batches


def _learning_rate(run: ResolvedConfig, step: int, change: str) -> float:
    if change == "no decay from step 100":
        step = min(step, 99)
    return learning_rate(run, step) * {"lr 1% higher": 1.01, "lr 50% higher": 1.5}.get(change, 1.0)


def main() -> None:
    """Append the losses of every setting and change to a file, one JSON object per line."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with Path(sys.argv[1]).open("a") as out:
        for name, settings in SETTINGS.items():
            for change in (*ROUNDING, *ERRORS):
                losses, grad_norms = train(settings, change)
                curve = {"setting": name, "change": change, "precision": settings["precision"], "losses": losses}
                print(json.dumps(curve | {"grad_norms": grad_norms}), file=out, flush=True)


if __name__ == "__main__":
    main()
