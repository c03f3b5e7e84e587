"""Implementation of `megabench calibrate`: start one process per device, measure, and write the profile."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryFile

import psutil
import torch
import torch.distributed as dist

from megabench.calibrate.attention import NUM_ATTENTION_MEASUREMENTS, attention, fit_attention
from megabench.calibrate.fp8_products import fp8_cost, num_fp8_measurements
from megabench.calibrate.links import collective_launch, interference, links, num_link_measurements
from megabench.calibrate.operations import (
    dram_rate,
    fit_products,
    host_copy,
    launch,
    memory_rate,
    num_device_measurements,
    peak,
    products,
)
from megabench.calibrate.timers import Bench
from megabench.config import ConfigError
from megabench.cost.profile import ATTENTION, Profile, profile_for
from megabench.hardware.facts import RankFacts, read_facts
from megabench.hardware.topology import Topology, emulated_host, from_facts, split
from megabench.models.find import find_model
from megabench.models.shape import ModelShape
from megabench.runtime import ranks, rendezvous
from megabench.runtime.device import choose_device, device_name, gpu_uuid, memory_gib
from megabench.terminal import ProgressLine, standard_output
from megabench.train.rank_setup import split_nccl

_MOST_TOKENS = {"cuda": 8192, "cpu": 256}
_ORIGIN = "megabench calibrate"


def calibrate(
    shape: ModelShape,
    seq_length: int,
    device: torch.device,
    emulate_hosts: int | None,
    show: Callable[[str], None] = lambda activity: None,
) -> Profile:
    """Measure this machine and return its profile.

    Every rank of the default process group must call `calibrate`. All ranks receive equal profiles. `show` is called
    with the name of each measurement before the measurement starts.
    """
    topology = _topology(device, emulate_hosts)
    base, num_fp8 = profile_for(device_name(device)), num_fp8_measurements(shape, device_name(device))
    total = num_device_measurements(shape) + NUM_ATTENTION_MEASUREMENTS + num_fp8
    if dist.get_world_size() > 1:
        total += num_link_measurements(topology, device.type)
    bench = Bench(device, lambda number, kind: show(f"measurement {number} of {total}: {kind}"))
    found: dict[str, object] = {}
    origin = {"*": f"not measured here: from the shipped profile {base.name}"}

    def note(**values: object) -> None:
        found.update(values)
        origin.update(dict.fromkeys(values, _ORIGIN))

    here = dist.get_world_size() if topology.emulated else max(map(len, topology.ranks_by_host))
    note(memory_gib=memory_gib(device) or psutil.virtual_memory().total / here / 2**30)
    is_cuda = device.type == "cuda"
    note(num_sms=torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else torch.get_num_threads())
    note(memory_gb_per_s=memory_rate(bench))
    tokens = min(seq_length, _MOST_TOKENS[device.type])
    timed = products(bench, shape, tokens)
    most = peak(base, device, bench, timed)
    note(peak_tflops={bench.precision: most / 1e12})
    profile = fit_products(base.model_copy(update=found), most, timed)
    note(gemm_efficiency=profile.gemm_efficiency, gemm_half_k=profile.gemm_half_k)
    if num_fp8:
        note(fp8=fp8_cost(bench, shape, tokens, profile, base.peak(device_name(device), "fp8")))
    profile = fit_attention(profile, most, attention(bench, shape, tokens))
    note(**{name: getattr(profile, name) for name in ATTENTION})
    note(launch_seconds=launch(bench), host_copy_gb_per_s=host_copy(bench))
    note(dram_gb_per_s=dram_rate(bench, topology))
    if dist.get_world_size() > 1:
        note(collective_launch_seconds=collective_launch(bench))
        if (lost := interference(bench, topology, tokens, shape)) is not None:
            note(interference=lost)
        measured = links(bench, topology, base)
        note(links=base.links | measured)
        origin["links"] = f"{_ORIGIN}: {', '.join(measured)}; all other links: from the shipped profile {base.name}"
    fields = base.model_dump() | found | {"links": found.get("links", base.links)}
    fields |= {"name": f"{base.name}-here", "devices": [device_name(device)], "kind": "measured", "origin": origin}
    return Profile.model_validate(fields | {"measurements": bench.measurements})


def _topology(device: torch.device, emulate_hosts: int | None) -> Topology:
    local = device.index or 0
    mine = read_facts(local, gpu_uuid(local) if device.type == "cuda" else None)
    if emulate_hosts:  # `split` emulates the hosts, so ignore the NCCL_HOSTID that `split_nccl` has set
        mine = mine.model_copy(update={"nccl_hostid": None})
    facts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(facts, mine.model_dump_json())
    topology = from_facts([RankFacts.model_validate_json(text) for text in facts])
    return split(topology, emulate_hosts) if emulate_hosts and len(topology.hosts) == 1 else topology


def write(profile: Profile, path: Path) -> None:
    """Write the profile to a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(profile.model_dump(exclude_defaults=True), indent=2) + "\n")


def _check_writable(path: Path) -> None:
    """Create the parent folder of `path`. Raise ConfigError if no file can be written at `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}. Give another path.") from None
    if path.is_dir():
        raise ConfigError(f"--out {path} is a directory. Use the path of a file.")


def run(out: Path, model: str, seq_length: int | None, num_processes: int | None, emulate_hosts: int | None) -> None:
    """Measure with one process per GPU, or with the launcher's processes. Rank 0 writes the profile to `out`."""
    shape = find_model(model)
    if rendezvous.rank_from_environment() == 0:
        _check_writable(out)
    launched = rendezvous.world_size_from_environment() if "RANK" in os.environ else None
    size = launched or num_processes or torch.cuda.device_count() or 2
    device = choose_device("auto", size if launched is None else 1)
    if emulate_hosts:
        if size % emulate_hosts:
            raise ConfigError(
                f"emulate_hosts={emulate_hosts} does not divide the {size} ranks. "
                f"Set emulate_hosts to a divisor of {size}."
            )
        split_nccl(emulated_host(rendezvous.rank_from_environment(), size, emulate_hosts))
    line = ProgressLine(standard_output())
    with line if rendezvous.rank_from_environment() == 0 else nullcontext(), ranks.joined(size, device) as rank:
        here = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        profile = calibrate(shape, seq_length or shape.seq_length, here, emulate_hosts, line.update)
        if rank == 0:
            write(profile, out)
            line.stop()
            line.say(f"{out}: {len(profile.measurements)} measurements in {line.elapsed}")
