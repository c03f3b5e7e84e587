"""What is measured between hosts: who sends to whom, and figures of one kind."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megabench.hardware.topology import Host, Topology, build
from megabench.record import LinkBandwidth
from megabench.train.comm_preflight import measure_bandwidth
from tests import distributed

pytestmark = pytest.mark.distributed


def measured(topology: Topology) -> tuple[LinkBandwidth, list[list[int]], list[tuple[int, ...]]]:
    """What was measured, the ranks of each all-gather that this one took part in, and whom it sent to."""
    gathers, sends = [], []
    gather, batch = dist.all_gather_into_tensor, dist.batch_isend_irecv

    def note_gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        gathers.append(dist.get_process_group_ranks(group or dist.group.WORLD))
        gather(whole, part, group=group)

    def note_sends(operations: list[dist.P2POp]) -> list[dist.Work]:
        sends.append(tuple(operation.peer for operation in operations if operation.op is dist.isend))
        return batch(operations)

    with patch.multiple(dist, all_gather_into_tensor=note_gather, batch_isend_irecv=note_sends):
        return measure_bandwidth(topology, torch.device("cpu")), gathers, sends


def test_a_ring_of_all_ranks_one_message_and_a_ring_for_each_rank_of_a_host() -> None:
    host = Host("host", "cpu", "shm", "socket")
    topology = build([(host, 2, 2), (host, 3, 3)])  # one seat more on the second host, which has no partner
    answers = distributed.run(measured, 5, topology)
    everyone = list(range(5))
    rings = [[ring for ring in gathers if ring != everyone] for _, gathers, _ in answers]
    repeats = len(rings[0])
    assert repeats > 1
    assert rings == [repeats * [ring] for ring in ([0, 2], [1, 3], [0, 2], [1, 3])] + [[]]
    assert all(gathers.count(everyone) == repeats for _, gathers, _ in answers)
    assert [{peers for peers in sends if peers} for _, _, sends in answers] == [{(2,)}, set(), set(), set(), set()]
    for link, _, _ in answers:
        assert link.num_bytes > 0
        assert min(link.all_gather_gb_per_s, link.send_recv_gb_per_s, link.all_rings_gb_per_s) > 0


def test_hosts_of_one_rank_have_one_ring() -> None:
    topology = build([(Host("host", "cpu", "shm", "socket"), 1, 1)] * 2)
    for link, _, _ in distributed.run(measured, 2, topology):
        assert link.all_rings_gb_per_s == link.all_gather_gb_per_s
