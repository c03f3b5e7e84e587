"""Placement among real processes: all decide alike, groups hold whom they should, and training is the same work."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore

from megabench.config import ResolvedConfig
from megabench.engines.build import process_groups
from megabench.hardware.facts import read_facts
from megabench.hardware.topology import discover
from megabench.parallel.placement import Placement, place
from tests import distributed
from tests.engines.equivalence import TOLERANCE, Trace, differences, reference_of, resolve, train, worst

pytestmark = pytest.mark.distributed


def train_placed(run: ResolvedConfig, hosts: str) -> tuple[Placement, dict[str, list[int]], Trace]:
    """Trains in a world renumbered for made-up hosts, one letter a rank; the groups in the launcher's ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    os.environ["NCCL_HOSTID"] = hosts[rank]
    try:
        facts = read_facts(rank, None)
    finally:
        del os.environ["NCCL_HOSTID"]
    topology = discover(PrefixStore("discovery", store), facts, rank, world_size)
    placement = place(topology, run.layout, run.placement)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=PrefixStore("placed", store),
        rank=placement.rank_of(rank),
        world_size=world_size,
        timeout=timedelta(seconds=240),
    )
    groups = {
        axis: sorted(placement.launcher_ranks[member] for member in dist.get_process_group_ranks(group))
        for axis, group in process_groups(run).items()
    }
    return placement, groups, train(run)


def run_placed(hosts: str, **fields: Any) -> tuple[Placement, list[dict[str, list[int]]], Trace]:
    run = resolve(len(hosts), **fields)
    results = distributed.run(train_placed, len(hosts), run, hosts)
    placements = [placement for placement, _, _ in results]
    assert all(placement == placements[0] for placement in placements), "every rank decides alike"
    assert all(trace.losses == results[0][2].losses for _, _, trace in results)
    trace = next(trace for _, _, trace in results if trace.gradients)
    return placements[0], [groups for _, groups, _ in results], trace


def assert_equal_to_one_process(trace: Trace, **fields: Any) -> None:
    """As the launcher's own order is: tests/engines/test_equivalence.py."""
    name, difference = worst(differences(trace, reference_of(**fields)))
    assert difference < TOLERANCE, f"{name} differs by {difference:.1e}"


def same_host(hosts: str, ranks: list[int]) -> bool:
    return len({hosts[rank] for rank in ranks}) == 1


@pytest.mark.parametrize(
    ("hosts", "fields", "order"),
    [
        ("AABB", {"tp": 2, "pp": 2}, (0, 1, 2, 3)),
        ("ABAB", {"tp": 2, "pp": 2}, (0, 2, 1, 3)),
        ("BABA", {"tp": 2}, (0, 2, 1, 3)),
        ("DCBA", {"pp": 4}, (0, 3, 2, 1)),
        ("ABABABAB", {"tp": 4, "pp": 2}, (0, 2, 4, 6, 1, 3, 5, 7)),
        ("ABAB", {"engine": "deepspeed", "zero_stage": 3}, (0, 2, 1, 3)),
    ],
)
def test_a_renumbered_world_does_the_same_work(hosts, fields, order):
    placement, groups, trace = run_placed(hosts, **fields)
    assert placement.launcher_ranks == order and not placement.warnings
    assert all(same_host(hosts, of_rank["tp"]) for of_rank in groups if "tp" in of_rank)
    for rank, of_rank in enumerate(groups):
        assert all(rank in ranks for ranks in of_rank.values())
    assert_equal_to_one_process(trace, **fields)


def test_spread_tp_is_another_placement_of_the_same_work():
    placement, groups, trace = run_placed("AABB", tp=2, pp=2, placement="spread-tp")
    assert placement.launcher_ranks == (0, 2, 1, 3)
    assert not any(same_host("AABB", of_rank["tp"]) for of_rank in groups)
    assert all(same_host("AABB", of_rank["pp"]) for of_rank in groups)
    assert_equal_to_one_process(trace)
