"""`megabench plan --map`: the best layout and its MFU by model and number of hosts. Loads no torch."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from megabench.config import ConfigError
from megabench.config.clusters import read_cluster
from megabench.cost.memory import LIKELY
from megabench.hardware.gpus import find_ultraserver
from megabench.hardware.topology import MOST_HOSTS, positive_count
from megabench.models.find import find_model
from megabench.parallel.layout import Layout
from megabench.planner.layout_table import Column, print_table
from megabench.planner.plan_json import describe_estimate
from megabench.planner.reasons import chosen
from megabench.planner.search import Plan

MODELS = "llama3-8b,llama3-70b,llama3-405b"


@dataclass(frozen=True)
class Cell:
    """The plan of one model on a number of hosts or UltraServers."""

    model: str
    count: int
    plan: Plan

    @property
    def words(self) -> str:
        """The recommended layout without its dp, and its MFU, or "–" if no layout is likely to fit."""
        if not self.plan.ranked:
            return "–"
        best = chosen(self.plan)
        candidate = best.candidate
        plain = replace(candidate.layout, dp=None)
        sizes = candidate.layout if plain == Layout() else plain
        name = f"{candidate.variant.prefix(candidate.engine)}{sizes}"
        return " ".join([name, *candidate.variant.words, f"{best.mfu:.0%}"])


def make_map(models: str, cluster: str, global_batch: int | None, make: Callable[..., Plan]) -> list[Cell]:
    """Return the cells of several models, by comma, on 1, 2, 4, … hosts up to those of "TYPE:COUNT[:GPUS]".

    `make` plans for a model on a cluster, with a global batch. By default, that is the model's, or one sequence per GPU
    if that is more. Raises ConfigError for a cluster of another form.
    """
    name, _, rest = cluster.partition(":")
    text, _, gpus = rest.partition(":")
    if (count := positive_count(text, MOST_HOSTS)) is None:
        raise ConfigError(
            f"--map needs an instance type and the largest number of hosts, which must be 1 to {MOST_HOSTS}, e.g. "
            f"--cluster {name}:64"
        )
    sizes = [2**power for power in range(count.bit_length())]
    sizes += [count] * (count not in sizes)
    hosts = {size: f"{name}:{size}" + f":{gpus}" * bool(gpus) for size in sizes}
    num_gpus = {size: read_cluster(text).world_size for size, text in hosts.items()}
    names = models.split(",")
    batches = {name: find_model(name).global_batch for name in names}

    def cell(size: int, name: str) -> Cell:
        batch = global_batch or max(batches[name], num_gpus[size])
        return Cell(name, size, make(name, hosts[size], global_batch=batch))

    return [cell(size, name) for size in sizes for name in names]


def write_map(console: Console, cells: Sequence[Cell], cluster: str) -> None:
    """Print a row for each number of hosts and a column for each model."""
    name = cluster.partition(":")[0]
    models, sizes = list(dict.fromkeys(cell.model for cell in cells)), list(dict.fromkeys(c.count for c in cells))
    unit = "UltraServers" if find_ultraserver(name) else "hosts"
    console.print(Text(f"Best layout and MFU by model and number of {unit} of {name}", style="bold"))
    by_place = {(cell.model, cell.count): cell.words for cell in cells}
    columns = [Column(unit, [str(size) for size in sizes], is_kept=True)]
    columns += [Column(one, [by_place[one, size] for size in sizes], is_text=True, is_kept=True) for one in models]
    print_table(console, columns)
    batches = "global batch: the model's, or one sequence per GPU if that is more"
    console.print(Text(f"–: no layout fits with a chance of {LIKELY:.0%} or more; {batches}"))


def map_as_json(cells: Sequence[Cell]) -> str:
    """Return the cells as JSON."""
    found: list[dict[str, Any]] = [
        {
            "model": cell.model,
            "num_hosts": len(cell.plan.topology.hosts),
            "global_batch": cell.plan.job.global_batch,
            "best": describe_estimate(chosen(cell.plan)) if cell.plan.ranked else None,
        }
        for cell in cells
    ]
    return json.dumps(found, indent=2)
