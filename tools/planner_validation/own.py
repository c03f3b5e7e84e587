"""Conversion of this project's records into validation rows. This module does not import torch."""

import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

from megabench.cost.fabric_files import read_fabric
from megabench.hardware.topology import Host, Topology, build
from megabench.planner.predict import candidate_of, job_of
from megabench.record import RunRecord, read_records
from tools.planner_validation.programs import Program
from tools.planner_validation.published import Row
from tools.planner_validation.sources import Source

# studies with known faults, which benchmarks/NOTES.md describes
_FAULTS = {"engines-4-gpus": " (torch.compile off by a fault)"}
# a study's file with the times of collectives that `megabench calibrate` measured between the study's hosts
_NETWORK = "network.json"
_SHARED = " (other programs used the GPUs)"
# Studies in which FSDP2, and DDP with several micro-batches, stored the gradients twice (see benchmarks/NOTES.md). This
# fault has been fixed, so the validation ignores the peak memory of both engines in these studies.
_GRADIENTS_HELD_TWICE = (
    "bloom-7b1-scale",
    "engines-4-gpus",
    "engines-bf16",
    "llama3-8b-nvlink",
    "llama3-8b-nvlink-synthetic",
    "llama3-8b-two-gpus",
    "llama3-8b-two-gpus-synthetic",
    "llama3-8b-two-hosts",
    "llama3-8b-two-hosts-batch-64",
    "options-4-gpus",
    "qwen3-0.6b-dp",
)
_SOURCE = Source("own records", "", Program(), "socket")


def measured_studies(folder: Path, unpacked: Path) -> dict[str, Path]:
    """Return the directories of the studies in `folder` by name, in alphabetical order.

    The studies of `more-studies.tar.gz` are unpacked into the directory `unpacked`.
    """
    with tarfile.open(folder / "more-studies.tar.gz") as archive:
        archive.extractall(unpacked, filter="data")
    found = {path.parent.name: path.parent for place in (folder, unpacked) for path in place.glob("*/results.jsonl")}
    return dict(sorted(found.items()))


def read_own(folder: Path) -> list[Row]:
    """Read the GPU measurements of every study in `folder`, averaged over repeated runs."""
    with TemporaryDirectory() as unpacked:
        return _rows_of(measured_studies(folder, Path(unpacked)))


def _rows_of(studies: Mapping[str, Path]) -> list[Row]:
    rows: list[Row] = []
    seen: set[tuple[float, ...]] = set()  # one run can be part of two studies
    for study, directory in studies.items():
        records, trials = read_records(directory / "results.jsonl"), dict[str, list[Row]]()
        shares = any(machine.num_other_gpu_processes for record in records for machine in record.machines)
        name = study + _FAULTS.get(study, _SHARED if shares else "")
        for record in records:
            steps = tuple(record.step_seconds.all) if record.step_seconds else ()
            if steps not in seen and (row := row_of(record, records)):
                seen.add(steps)
                if study in _GRADIENTS_HELD_TWICE and _held_twice(row):
                    row.measured.pop("memory_gib", None)
                found = replace(row, source=replace(_SOURCE, name=name))
                trials.setdefault(record.trial, []).append(_with_fabric(found, directory / _NETWORK))
        rows += map(_mean, trials.values())
    return rows


def _with_fabric(row: Row, path: Path) -> Row:
    """Return the row with the network that the study measured, if it has this file, instead of the runs' bandwidths."""
    if not path.exists():
        return row
    plain = tuple(replace(host, network_gbits=None, ring_gbits=None) for host in row.topology.hosts)
    return replace(row, topology=replace(row.topology, hosts=plain), fabric=read_fabric(path))


def is_disturbed(row: Row) -> bool:
    """Return whether a fault or another program disturbed the row's study."""
    return row.source.name.endswith((_SHARED, *_FAULTS.values()))


def _held_twice(row: Row) -> bool:
    engine = row.candidate.engine
    return engine == "fsdp" or (engine == "ddp" and row.candidate.num_micro_batches(row.job) > 1)


def _mean(runs: Sequence[Row]) -> Row:
    """Return one row with the mean measurements of a trial's runs."""
    first = runs[0]
    measured = {kind: mean(row.measured[kind] for row in runs) for kind in first.measured}
    return replace(first, measured=measured)


def row_of(record: RunRecord, study: Sequence[RunRecord]) -> Row | None:
    """Return the row of a record, or None unless the trial succeeded on GPUs with an engine that the planner predicts.

    `study` contains all records of the trial's study.
    """
    candidate = candidate_of(record)
    if candidate is None or record.status != "ok" or record.step_seconds is None or record.device in (None, "cpu"):
        return None
    row = Row(_SOURCE, job_of(record), _topology(record, study), candidate, is_fit=False)
    row.measured["seconds"] = record.step_seconds.median
    if record.peak_memory_gib:
        row.measured["memory_gib"] = record.peak_memory_gib.max
    return row


def _topology(record: RunRecord, study: Sequence[RunRecord]) -> Topology:
    """Return the topology of a record: equal hosts, emulated or real, with NVLink inside each host.

    The bandwidth between hosts is the median over the study's runs with the same number of hosts and ranks, and with
    the same limit of `emulate_network`. A single bandwidth measurement takes about one second, and two measurements of
    one link differ by about 20%.
    """
    hosts = record.num_hosts or 1
    same = [other for other in study if _network(other) == _network(record)]
    measured = [other.link_bandwidth for other in same if other.link_bandwidth]
    ring = _median_gbits([link.all_gather_gb_per_s for link in measured])
    host = Host(
        name="host",
        device=record.device or "",
        inside="pcie",
        network="socket",
        network_gbits=_median_gbits([link.all_rings_gb_per_s for link in measured if link.all_rings_gb_per_s]) or ring,
        nvlink_gb_per_s=450.0,
        ring_gbits=ring,
    )
    size = record.world_size // hosts
    return build([(host, size, size)] * hosts)


def _network(record: RunRecord) -> object:
    """Return what two runs have in common if their hosts have the same network."""
    return record.num_hosts, record.world_size, record.emulated_network and record.emulated_network.gb_per_s


def _median_gbits(gb_per_s: Sequence[float]) -> float | None:
    return 8 * median(gb_per_s) if gb_per_s else None
