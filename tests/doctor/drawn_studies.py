"""Random valid studies: models of all families, clusters of the catalogue, and layouts of all planned engines."""

import random
from dataclasses import dataclass
from typing import Any

from megabench.config import RunConfig
from megabench.config.auto import resolve_first
from megabench.errors import UserError
from megabench.hardware.gpus import INSTANCE_NAMES
from megabench.models.catalog import CATALOG
from megabench.models.find import find_model
from megabench.parallel.layout import divisors
from megabench.planner.engines.registry import PLANNED_ENGINES
from megabench.precision import POLICIES
from tests.planner.jobs import cluster

_FILES = ("a100-pairs", "gb200-nvl72", "h200-uneven", "one-gpu-pods", "two-hosts-by-sockets")
_MOST_GPUS = 64  # larger plans take seconds


@dataclass(frozen=True)
class DrawnStudy:
    """A study with one kind of work. `base` has the work, and `trials` the layouts."""

    cluster: str
    base: dict[str, Any]
    trials: list[dict[str, Any]]


def draw(seed: int) -> DrawnStudy:
    """Return a study whose trials are valid. Not every layout fits into memory."""
    dice = random.Random(seed)
    while True:
        where = _cluster(dice)
        world = cluster(where).world_size
        base = _work(dice, world)
        trials = [trial for _ in range(12) if (trial := _layout(dice, base, world)) is not None]
        distinct = [trial for number, trial in enumerate(trials) if trial not in trials[:number]]
        if distinct:
            return DrawnStudy(where, base, distinct[: dice.randint(1, 4)])


def _cluster(dice: random.Random) -> str:
    while True:
        count = dice.choice([1, 1, 2, 3, 4, 8, 16])
        where = dice.choice([*_FILES, *(f"{name}:{count}" for name in INSTANCE_NAMES)])
        if cluster(where).world_size <= _MOST_GPUS:
            return where


def _work(dice: random.Random, world: int) -> dict[str, Any]:
    model = dice.choice(sorted(CATALOG))
    shape = find_model(model)
    precision = dice.choice(["bf16", "bf16", "bf16", *POLICIES])
    base: dict[str, Any] = {
        "model": model,
        "seq_length": dice.choice(
            [one for one in (256, 1024, 2048, 4096, 8192) if one <= (shape.max_seq_length or one)]
        ),
        "global_batch": dice.choice([world, 2 * world, 3 * world, 16 * world, 48, 64]),
        "precision": precision,
        "grad_dtype": dice.choice(POLICIES[precision].grad_dtypes),
        "optimizer": dice.choice(["adamw", "adamw", "adamw", "sgd", "muon"]),
    }
    if dice.random() < 0.2:
        base["num_layers"] = max(2, shape.num_layers // 2)
    if precision == "fp8":
        base["fp8_recipe"] = dice.choice(["tensorwise", "bf16-gradients"])
    return base


def _layout(dice: random.Random, base: dict[str, Any], world: int) -> dict[str, Any] | None:
    """Return the settings of a trial, or None if they are not valid."""
    name = dice.choice(list(PLANNED_ENGINES))
    engine = PLANNED_ENGINES[name]
    trial: dict[str, Any] = {"engine": name, "recompute": dice.choice(sorted(engine.spec.recompute))}
    if not engine.spec.is_data_parallel:
        tp = dice.choice(divisors(world, 16))
        cp = dice.choice(divisors(world // tp, 4))
        pp = dice.choice(divisors(world // tp // cp, 16))
        trial |= {"tp": tp, "cp": cp, "pp": pp, "vp": dice.choice([1, 2, 4]) if pp > 1 else 1}
        trial |= {"placement": dice.choice(["topology", "topology", "spread-tp"])}
        trial |= {"keep_gathered": True} if tp > 1 and dice.random() < 0.1 else {}
    elif name == "deepspeed":
        stage = dice.choice([0, 1, 2, 3])
        trial |= {
            "zero_stage": stage,
            "offload": dice.choice(["none", "none", "optimizer", "all"][: max(1, stage + 1)]),
        }
        trial |= {"zero_leaf_layers": True, "reshard_after_forward": dice.choice([True, False])} if stage == 3 else {}
    elif name == "fsdp":
        trial |= {"offload": dice.choice(["none", "none", "all"]), "reshard_after_forward": dice.choice([True, False])}
    if engine.spec.sharding_stage in (1, 3) and dice.random() < 0.2 and name != "deepspeed":
        trial["shard_size"] = dice.choice(divisors(world))
    sizes = [size for size in divisors(base["global_batch"]) if size <= 64]
    trial["micro_batch"] = "auto" if dice.random() < 0.1 else dice.choice(sizes)
    try:
        resolve_first(RunConfig.parse(base | trial), world, "cuda")
    except UserError:
        return None
    return trial
