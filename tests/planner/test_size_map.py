"""`megabench plan --map`: layouts and MFU by model and number of hosts."""

import io
import json

import pytest
from rich.console import Console

from megabench.config import ConfigError
from megabench.errors import UserError
from megabench.planner.size_map import make_map, map_as_json, write_map
from tests.planner.test_own_layout import planned
from tests.planner.test_plan import megabench


def test_numbers_of_hosts_are_powers_of_two_and_the_largest():
    asked = []

    def make(model: str, cluster: str, global_batch: int):
        asked.append((model, cluster, global_batch))
        return planned("p5.48xlarge:1")

    cells = make_map("llama3-8b,llama3-70b", "p5.48xlarge:6:4", None, make)
    assert [(cell.model, cell.count) for cell in cells[:3]] == [
        ("llama3-8b", 1),
        ("llama3-70b", 1),
        ("llama3-8b", 2),
    ]
    assert [cluster for model, cluster, _ in asked if model == "llama3-8b"] == [
        f"p5.48xlarge:{count}:4" for count in (1, 2, 4, 6)
    ]
    assert all(batch == 32 for model, _, batch in asked if model == "llama3-8b")


def test_small_batches_grow_to_one_sequence_per_gpu():
    batches = []

    def make(model: str, cluster: str, global_batch: int):
        batches.append(global_batch)
        return planned("p5.48xlarge:1")

    make_map("llama3-8b", "p5.48xlarge:8", None, make)
    assert batches == [32, 32, 32, 64]
    batches.clear()
    make_map("llama3-8b", "p5.48xlarge:2", 128, make)
    assert batches == [128, 128]


@pytest.mark.parametrize("cluster", ["p5.48xlarge", "a100-pairs", "p5.48xlarge:0", "p5.48xlarge:many", "p5.48xlarge:²"])
def test_a_map_needs_a_type_and_a_count(cluster):
    with pytest.raises(ConfigError, match="--map needs an instance type and the largest number of hosts"):
        make_map("llama3-8b", cluster, None, lambda *_, **__: planned())


@pytest.mark.parametrize(
    ("models", "cluster"), [("llama3-8b", "p5.48xlarge:9999"), ("llama3-8b,nope", "p5.48xlarge:2")]
)
def test_mistakes_are_told_before_the_first_plan(models, cluster):
    with pytest.raises(UserError, match=r"must be 1 to 4096|unknown model 'nope'"):
        make_map(models, cluster, None, lambda *_, **__: pytest.fail("planned"))


def test_ultraservers_are_called_so():
    cluster, text = "u-p6e-gb200x36:2", io.StringIO()
    cells = make_map("llama3-8b", cluster, None, lambda model, where, **_: planned(where, model))
    write_map(Console(file=text, width=120), cells, cluster)
    assert "number of UltraServers of u-p6e-gb200x36" in text.getvalue() and "| UltraServers |" in text.getvalue()
    assert [one["num_hosts"] for one in json.loads(map_as_json(cells))] == [9, 18]


@pytest.mark.e2e
def test_the_command():
    asked = ("plan", "--map", "--model", "llama3-8b,llama3-70b", "--cluster", "p4d.24xlarge:2")
    text = megabench(*asked).stdout
    found = json.loads(megabench(*asked, "--json").stdout)
    assert [(one["model"], one["num_hosts"]) for one in found] == [
        ("llama3-8b", 1), ("llama3-70b", 1), ("llama3-8b", 2), ("llama3-70b", 2)
    ]  # fmt: skip
    best = found[0]["best"]
    row = next(line for line in text.splitlines() if line.startswith("|     1 |"))
    assert f" {best['mfu']:.0%} |" in row and "–" in row and found[1]["best"] is None
