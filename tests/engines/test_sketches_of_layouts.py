"""Sketches of correct runs do not differ: pairs of layouts and engines, drawn at random.

`make test-exhaustive` runs this file. With `-s` it prints how much of its tolerance each pair uses.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megabench import sketch
from megabench.errors import UserError
from megabench.models.catalog import get_model
from megabench.specs.registry import ENGINES
from megabench.tensor_parity import compare_files
from tests.engines.equivalence import resolve
from tests.test_tensor_parity import BASE, Sketched, train

pytestmark = [pytest.mark.distributed, pytest.mark.exhaustive]

NUM_PAIRS = 30
MODELS = (
    *("llama-tiny", "llama-odd", "llama31-tiny", "llama32-tiny", "llama-padded-tied", "mistral-tiny"),
    *("qwen2-tiny", "qwen3-tiny", "gpt2-tiny", "bloom-tiny"),
)
KINDS = (("gradient", 1), ("exp_avg_sq", 1), ("gradient", 2), ("update", 1))
Case = tuple[int, dict[str, Any]]  # number of ranks, settings


def _layout(draw: random.Random, model: str, precision: str) -> Case:
    """Draw an engine that trains the model, and settings that it accepts and that change no result."""
    work = {"model": model, "num_layers": 4, "precision": precision}
    engines = [
        name for name, spec in ENGINES.items() if get_model(model).table.has_parallel_blocks or not spec.needs_blocks
    ]
    engine = draw.choice(engines)
    while True:
        world_size = draw.choice([1, 2, 4])
        fields: dict[str, Any] = {"engine": engine, "micro_batch": draw.choice([1, 2])}
        fields["recompute"] = draw.choice(["none", "full"])
        if engine == "deepspeed":
            fields["zero_stage"] = draw.choice([1, 2, 3])
        if engine == "megatron":
            fields |= {axis: draw.choice([1, 2, 4]) for axis in ("tp", "pp", "cp")} | {"vp": draw.choice([1, 2])}
        if engine in ("fsdp", "megatron", "megatron_fsdp") and draw.random() < 0.5:
            fields["shard_size"] = 2
        try:
            resolve(world_size, **BASE | work | fields)
        except UserError:
            continue
        return world_size, work | fields


def _pair(number: int) -> tuple[Case, Case]:
    draw = random.Random(number)
    model, precision = draw.choice(MODELS), ("fp32", "bf16")[number % 2]
    ours = theirs = _layout(draw, model, precision)
    while theirs == ours:
        theirs = _layout(draw, model, precision)
    return ours, theirs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Sketched:
    return Sketched(tmp_path_factory.mktemp("sketches"), train)


def _largest(paths: Sequence[Path]) -> dict[tuple[str, int, str], tuple[float, float]]:
    """Return the largest differences of a tensor and of a block, by kind, step (2 for later ones), matrix or vector."""
    (ours, _), (theirs, _) = map(sketch.read, paths)
    found: dict[tuple[str, int, str], tuple[float, float]] = {}
    for kind, step in {key[:2] for key in theirs}:
        mine, other = (
            {name: one for (*moment, name), one in tensors.items() if moment == [kind, step]}
            for tensors in (ours, theirs)
        )
        for one in sketch.compare(mine, other, kind, step):
            shape = "matrix" if other[one.name][1].any() else "vector"
            key = (kind, 1 if kind == "update" else min(step, 2), shape)
            found[key] = max(found.get(key, (0.0, 0.0)), (one.relative, one.of_block), key=max)
    return found


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, Any]]:
    """The largest differences of all pairs by precision, which are printed as the rows of a table at the end."""
    of_precision: dict[str, Any] = {"fp32": {}, "bf16": {}}
    yield of_precision
    for precision, largest in of_precision.items():
        for shape in ("matrix", "vector") if largest else ():
            cells = ("{:.2g}, {:.2g}".format(*largest[*key, shape]) for key in KINDS)
            print(f"\n| {precision} | {shape} | " + " | ".join(cells) + " |")


@pytest.mark.parametrize("number", range(NUM_PAIRS))
def test_equal_work_does_not_differ(trained: Sketched, table: dict[str, Any], number: int) -> None:
    ours, theirs = _pair(number)
    paths = [trained(str(case), case[0], **case[1])[0] for case in (ours, theirs)]
    found = compare_files(*paths)
    print(f"\n{found.part_of_tolerance:.3g} of the tolerance: {found.largest}\n{ours}\n{theirs}")
    total = table[ours[1]["precision"]]
    for key, largest in _largest(paths).items():
        total[key] = max(total.get(key, largest), largest, key=max)
    assert found.problems == []
