"""`megabench calibrate`: measures this machine in about a minute, into a profile that `megabench plan` reads.

Every rank times the same things at the same moment, as in training, and the slowest counts.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megabench.config import ConfigError
from megabench.hardware.catalog import find_gpu
from megabench.hardware.facts import RankFacts, read_facts
from megabench.hardware.topology import Link, Topology, emulated_host, from_facts, split
from megabench.models.find import find_model
from megabench.models.shape import ModelShape
from megabench.planner import compute, network
from megabench.planner.compute import Machine
from megabench.planner.profile import LinkCost, Measurement, Profile, profile_for
from megabench.planner.validation.fit import descend
from megabench.runtime import ranks, rendezvous
from megabench.runtime.device import DTYPES, choose_device, device_name, gpu_uuid, memory_gib, synchronize
from megabench.train.placing import split_nccl

_TARGET_SECONDS = {"cuda": 0.03, "cpu": 0.01}  # that a thing is repeated for
_SIZES = {"cuda": [2**16, 2**20, 2**24, 2**27, 2**29], "cpu": [2**12, 2**16, 2**20, 2**22]}  # bytes of a collective
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**24}
_MOST_TOKENS = {"cuda": 8192, "cpu": 256}
_TINY_OPERATIONS = 200
_ORIGIN = "megabench calibrate"


class Bench:
    """Times operations on this rank and all others; what was timed is collected in `measurements`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.precision = "bf16" if device.type == "cuda" else "fp32"
        self.measurements: list[Measurement] = []

    def seconds(self, kind: str, operation: Callable[[], object], **sizes: float) -> float:
        """Median seconds of an operation on the slowest rank, the host's launch hidden by repetition."""
        operation()
        once = self._agreed(self._timed(operation, 1))
        repeats = max(1, min(100, int(_TARGET_SECONDS[self.device.type] / max(once, 1e-7))))
        found = self._agreed(statistics.median(self._timed(operation, repeats) for _ in range(3)))
        self.measurements.append(Measurement(kind=kind, sizes=sizes, seconds=found))
        return found

    def _timed(self, operation: Callable[[], object], repeats: int) -> float:
        dist.barrier()
        synchronize(self.device)
        started = time.perf_counter()
        for _ in range(repeats):
            operation()
        synchronize(self.device)
        return (time.perf_counter() - started) / repeats

    def _agreed(self, seconds: float) -> float:
        slowest = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=DTYPES[self.precision], device=self.device)


def calibrate(shape: ModelShape, seq_length: int, device: torch.device, emulate_hosts: int | None) -> Profile:
    """The profile of this machine; every rank of the default process group must call it, and gets the same."""
    topology = _topology(device, emulate_hosts)
    bench = Bench(device)
    base = profile_for(device_name(device))
    found: dict[str, object] = {}
    origin = {"*": f"not measured here: shipped profile {base.name}"}

    def note(**values: object) -> None:
        found.update(values)
        origin.update(dict.fromkeys(values, _ORIGIN))

    here = max(map(len, topology.ranks_by_host))
    note(memory_gib=memory_gib(device) or psutil.virtual_memory().total / here / 2**30)
    if device.type == "cuda":
        note(num_sms=torch.cuda.get_device_properties(device).multi_processor_count)
    note(memory_gb_per_s=_memory_rate(bench))
    tokens = min(seq_length, _MOST_TOKENS[device.type])
    products = _products(bench, shape, tokens)
    peak = _peak(base, device, bench, products)
    note(peak_tflops={bench.precision: peak / 1e12})
    profile = base.model_copy(update=found)
    profile = _fit_products(profile, peak, products)
    note(gemm_efficiency=profile.gemm_efficiency, gemm_half_k=profile.gemm_half_k)
    forward, backward = _attention(bench, shape, tokens)
    note(attention_forward=min(1.0, forward / peak), attention_backward=min(1.0, backward / peak))
    note(launch_seconds=_launch(bench), host_copy_gb_per_s=_host_copy(bench))
    note(dram_gb_per_s=_dram_rate(bench, topology))
    if dist.get_world_size() > 1:
        note(collective_launch_seconds=_collective_launch(bench))
        note(interference=_interference(bench, tokens, shape))
        links = _links(bench, topology, base)
        note(links=base.links | links)
        origin["links"] = f"{_ORIGIN}: {', '.join(links)}; the others: shipped profile {base.name}"
    fields = base.model_dump() | found | {"links": found.get("links", base.links)}
    fields |= {"name": f"{base.name}-here", "devices": [device_name(device)], "kind": "measured", "origin": origin}
    return Profile.model_validate(fields | {"measurements": bench.measurements})


def _topology(device: torch.device, emulate_hosts: int | None) -> Topology:
    local = device.index or 0
    mine = read_facts(local, gpu_uuid(local) if device.type == "cuda" else None)
    facts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(facts, mine.model_dump_json())
    topology = from_facts([RankFacts.model_validate_json(text) for text in facts])
    return split(topology, emulate_hosts) if emulate_hosts and len(topology.hosts) == 1 else topology


def _memory_rate(bench: Bench) -> float:
    """GB/s of a sum of two tensors: two read, one written."""
    count = _COPY_BYTES[bench.device.type] // 2 // (4 if bench.precision == "fp32" else 2)
    a, b = bench.random(count), bench.random(count)
    out = torch.empty_like(a)
    seconds = bench.seconds("element-wise", lambda: torch.add(a, b, out=out), bytes=3 * a.nbytes)
    return 3 * a.nbytes / seconds / 1e9


def _products(bench: Bench, shape: ModelShape, tokens: int) -> list[Measurement]:
    """The matrix products of a layer and of the output layer at every tp that divides the heads, up to 8."""
    h, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    begun = len(bench.measurements)
    for tp in (tp for tp in (1, 2, 4, 8) if shape.num_kv_heads % tp == 0 and shape.ffn_size % tp == 0):
        sizes = [((q + 2 * kv) // tp, h), (h, q // tp), (2 * shape.ffn_size // tp, h), (h, shape.ffn_size // tp)]
        for n, k in [*sizes, (shape.vocab_size // tp, h)]:
            a, b = bench.random(tokens, k), bench.random(n, k)
            bench.seconds("product", lambda a=a, b=b: a @ b.t(), m=tokens, n=n, k=k, tp=tp)  # type: ignore[misc]
    return bench.measurements[begun:]


def _peak(base: Profile, device: torch.device, bench: Bench, products: Sequence[Measurement]) -> float:
    """Dense FLOP/s: the catalogue's, or that of the best product where the catalogue has none."""
    gpu = find_gpu(device_name(device))
    if gpu and (tflops := gpu.peak_tflops(bench.precision)):
        return tflops * 1e12
    return max(2 * one.sizes["m"] * one.sizes["n"] * one.sizes["k"] / one.seconds for one in products)


def _fit_products(profile: Profile, peak: float, products: Sequence[Measurement]) -> Profile:
    """The efficiency and the half-way inner size that are nearest to what the products took."""

    def loss(candidate: Profile) -> float:
        machine = Machine(candidate, peak)
        ratios = [
            compute.gemm_seconds(machine, one.sizes["m"], one.sizes["n"], one.sizes["k"]) / one.seconds
            for one in products
        ]
        return statistics.mean(max(ratio, 1 / ratio) - 1 for ratio in ratios)

    return descend(profile, ("gemm_efficiency", "gemm_half_k"), loss)


def _attention(bench: Bench, shape: ModelShape, tokens: int) -> tuple[float, float]:
    """FLOP/s of causal attention, forward and backward, by half the square and 2.5 times that."""
    query = bench.random(1, shape.num_heads, tokens, shape.head_dim).requires_grad_()
    key, value = (bench.random(1, shape.num_kv_heads, tokens, shape.head_dim).requires_grad_() for _ in range(2))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    with torch.no_grad():
        alone = bench.seconds("attention forward", forward, tokens=tokens)
    gradient = torch.ones_like(query)
    both = bench.seconds("attention", lambda: forward().backward(gradient), tokens=tokens)
    flops = 2.0 * tokens * tokens * shape.num_heads * shape.head_dim
    return flops / alone, 2.5 * flops / max(both - alone, alone)


def _launch(bench: Bench) -> float:
    """Seconds of the host for a kernel, forward and backward, when kernels take none."""
    start = bench.random(8).requires_grad_()

    def chain() -> None:
        value = start
        for _ in range(_TINY_OPERATIONS):
            value = value * 1.0001
        value.sum().backward()

    return bench.seconds("kernel launches", chain, kernels=2 * _TINY_OPERATIONS) / (2 * _TINY_OPERATIONS)


def _host_copy(bench: Bench) -> float:
    """GB/s from device to pinned host memory; on CPU of a copy."""
    count = _COPY_BYTES[bench.device.type] // 8
    here = torch.zeros(count, device=bench.device)
    there = torch.zeros(count, pin_memory=bench.device.type == "cuda")
    seconds = bench.seconds("host copy", lambda: there.copy_(here, non_blocking=True), bytes=here.nbytes)
    return here.nbytes / seconds / 1e9


def _dram_rate(bench: Bench, topology: Topology) -> float:
    """GB/s of host memory that all ranks of a host reach together, read and written."""
    a = torch.zeros(_COPY_BYTES[bench.device.type] // 4)
    seconds = bench.seconds("host memory", lambda: a.mul_(1.0), bytes=2 * a.nbytes)
    return 2 * a.nbytes * max(map(len, topology.ranks_by_host)) / seconds / 1e9


def _collective_launch(bench: Bench) -> float:
    """Seconds of the host to start a collective that moves nothing to speak of."""
    size = dist.get_world_size()
    part, whole = bench.random(8), bench.random(8 * size)

    def many() -> None:
        for _ in range(20):
            dist.all_gather_into_tensor(whole, part, async_op=True)

    dist.barrier()
    synchronize(bench.device)
    many()
    synchronize(bench.device)
    started = time.perf_counter()
    many()
    seconds = bench._agreed((time.perf_counter() - started) / 20)
    synchronize(bench.device)
    bench.measurements.append(Measurement(kind="collective launch", sizes={}, seconds=seconds))
    return seconds


def _interference(bench: Bench, tokens: int, shape: ModelShape) -> float:
    """The part of hidden communication that compute pays for: products and a gather at once, against each alone."""
    size = dist.get_world_size()
    a, b = bench.random(tokens, shape.hidden_size), bench.random(shape.hidden_size, shape.hidden_size)
    part = bench.random(_SIZES[bench.device.type][-2] // 4)
    whole = bench.random(part.numel() * size)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, part)

    communicate = bench.seconds("gather beside nothing", gather)
    one = bench.seconds("product beside nothing", lambda: a @ b)
    times = max(1, round(communicate / one))

    def products() -> None:
        for _ in range(times):
            a @ b

    def both() -> None:
        work = dist.all_gather_into_tensor(whole, part, async_op=True)
        products()
        work.wait()

    alone, together = bench.seconds("products", products), bench.seconds("products beside a gather", both)
    lost = together - max(alone, communicate)
    return min(1.0, max(0.0, lost / min(alone, communicate)))


def _links(bench: Bench, topology: Topology, base: Profile) -> dict[Link, LinkCost]:
    """What each kind of link achieves: all-gathers by size, over two ranks and over all, inside hosts and across."""
    found: dict[Link, LinkCost] = {}
    by_host = [sorted(ranks) for ranks in topology.ranks_by_host]
    kinds = [[ranks[: len(ranks) // 2 * 2] for ranks in by_host if len(ranks) > 1]]
    if len(by_host) > 1:
        kinds.append([[ranks[0] for ranks in by_host]])
    for groups in kinds:
        if not groups:
            continue
        pairs = [ranks[:2] for ranks in groups]
        times = {len(some[0]): _gather_times(bench, some) for some in (pairs, groups)}
        where = network.span(topology, groups)
        link = where.across or where.inside
        assert link
        found[link] = _link_cost(topology, where, link, times, base.links[link])
        _send_times(bench, pairs)
    return found


def _gather_times(bench: Bench, groups: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """(bytes gathered in all, seconds) by size, all groups at once; ranks of none only keep time."""
    mine = _new_group(groups)
    found = []
    for num_bytes in _SIZES[bench.device.type]:
        size = len(groups[0])
        part = torch.zeros(num_bytes // 4 // size, device=bench.device)
        whole = torch.zeros(part.numel() * size, device=bench.device)

        def gather(part: Tensor = part, whole: Tensor = whole) -> None:
            if mine is not None:
                dist.all_gather_into_tensor(whole, part, group=mine)

        found.append((float(whole.nbytes), bench.seconds("all-gather", gather, bytes=whole.nbytes, ranks=size)))
    return found


def _send_times(bench: Bench, pairs: Sequence[Sequence[int]]) -> None:
    """From the first to the second of each pair, by size."""
    rank = dist.get_rank()
    peer = next((pair[1 - list(pair).index(rank)] for pair in pairs if rank in pair), None)
    is_sender = any(pair[0] == rank for pair in pairs)
    for num_bytes in _SIZES[bench.device.type]:
        tensor = torch.zeros(num_bytes // 4, device=bench.device)

        def send(tensor: Tensor = tensor) -> None:
            if peer is not None:
                operation = dist.P2POp(dist.isend if is_sender else dist.irecv, tensor, peer)
                for work in dist.batch_isend_irecv([operation]):
                    work.wait()

        bench.seconds("send", send, bytes=tensor.nbytes)


def _new_group(groups: Sequence[Sequence[int]]) -> ProcessGroup | None:
    """This rank's group of several that are made at once; None where it is in none."""
    made = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
    return next((group for ranks, group in made if dist.get_rank() in ranks), None)


def _link_cost(
    topology: Topology,
    where: network.Span,
    link: Link,
    times: dict[int, list[tuple[float, float]]],
    before: LinkCost,
) -> LinkCost:
    """Bandwidth from the largest gather; base and hop from the smallest of two ranks and of all."""
    most = max(times)
    num_bytes, seconds = times[most][-1]
    rate = num_bytes * (most - 1) / most / (seconds - min(times[most][0][1], 0.5 * seconds)) / 1e9
    shortest = {ranks: found[0][1] for ranks, found in times.items()}
    hop = max(0.0, (shortest[most] - shortest[min(times)]) / (most - min(times))) if most > min(times) else 0.0
    hop = hop or before.hop_seconds
    stated = where.host.nvlink_gb_per_s if link == "nvlink" else None
    if where.across and where.host.network_gbits:
        stated = where.host.network_gbits / 8
    return LinkCost(
        efficiency=min(1.2, rate / stated) if stated else before.efficiency,
        base_seconds=max(0.0, shortest[min(times)] - hop * (min(times) - 1)),
        hop_seconds=hop,
        gb_per_s=rate,
    )


def write(profile: Profile, path: Path) -> None:
    """Writes a profile file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(profile.model_dump(exclude_defaults=True), indent=2) + "\n")


def run(out: Path, model: str, seq_length: int | None, num_processes: int | None, emulate_hosts: int | None) -> None:
    """Measures with one process a GPU, or those of the launcher, and writes the profile on rank 0."""
    shape = find_model(model)
    launched = rendezvous.world_size_from_environment() if "RANK" in os.environ else None
    size = launched or num_processes or torch.cuda.device_count() or 2
    device = choose_device("auto", size if launched is None else 1)
    if emulate_hosts:
        if size % emulate_hosts:
            raise ConfigError(f"emulate_hosts={emulate_hosts} does not divide the {size} ranks")
        split_nccl(emulated_host(rendezvous.rank_from_environment(), size, emulate_hosts))
    started = time.perf_counter()
    with ranks.joined(size, device) as rank:
        here = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        profile = calibrate(shape, seq_length or shape.seq_length, here, emulate_hosts)
        if rank == 0:
            write(profile, out)
            print(f"{out}: {len(profile.measurements)} measurements in {time.perf_counter() - started:.0f} s")
