"""What is measured between hosts: who sends to whom, and figures of one kind."""

import pytest
import torch
import torch.distributed as dist

from megabench.hardware.topology import Host, Topology, build
from megabench.record import LinkBandwidth
from megabench.train.network import measure_bandwidth
from tests import distributed

pytestmark = pytest.mark.distributed


def measured(topology: Topology) -> tuple[LinkBandwidth, list[tuple[int, ...]]]:
    """What was measured, and the ranks that this one sent to, in each exchange."""
    exchanges, batch = [], dist.batch_isend_irecv

    def note(operations: list[dist.P2POp]) -> list[dist.Work]:
        exchanges.append(tuple(operation.peer for operation in operations if operation.op is dist.isend))
        return batch(operations)

    dist.batch_isend_irecv = note
    try:
        return measure_bandwidth(topology, torch.device("cpu")), exchanges
    finally:
        dist.batch_isend_irecv = batch


def test_one_rank_sends_alone_and_then_all_of_every_host_to_the_next() -> None:
    host = Host("host", "cpu", "shm", "socket")
    topology = build([(host, 2, 2), (host, 3, 3)])  # one seat more on the second host, which has no partner
    answers = distributed.run(measured, 5, topology)
    everyone = [{receivers for receivers in exchanges if receivers} for _, exchanges in answers]
    assert everyone == [{(2,)}, {(3,)}, {(0,)}, {(1,)}, set()]
    sends = [sum(map(len, exchanges)) for _, exchanges in answers]
    assert sends[0] == sends[1] == sends[3] > 1
    assert sends[2] == 2 * sends[0], "this rank alone sends while no other does"
    for link, _ in answers:
        assert link.num_bytes > 0
        assert min(link.all_gather_gb_per_s, link.send_recv_gb_per_s, link.all_send_gb_per_s) > 0
