"""This project's own records as jobs and candidates. Loads no torch."""

from dataclasses import replace
from pathlib import Path
from typing import cast

from megabench.config import EngineName
from megabench.hardware.topology import Host, Topology, build
from megabench.models.find import find_model
from megabench.parallel.layout import Layout
from megabench.parallel.placement import Policy
from megabench.planner.job import Candidate, Job, Offload, Recompute, Stack
from megabench.planner.validation.published import Row, Source
from megabench.record import RunRecord, read_records

_SOURCE = Source("own records", "", Stack(), "socket")


def read_own(folder: Path) -> list[Row]:
    """What was measured on GPUs in the studies below a folder."""
    rows = []
    for path in sorted(folder.glob("*/results.jsonl")):
        found = (row_of(record) for record in read_records(path))
        rows += [replace(row, source=replace(_SOURCE, name=path.parent.name)) for row in found if row]
    return rows


def row_of(record: RunRecord) -> Row | None:
    """A trial that ran on GPUs; None for any other."""
    if record.status != "ok" or record.step_seconds is None or record.device in (None, "cpu"):
        return None
    shape = find_model(record.model)
    if record.work_class and record.work_class.num_layers != shape.num_layers:
        shape = shape.with_layers(record.work_class.num_layers)
    candidate = _candidate(record)
    job = Job(
        shape,
        record.seq_length,
        record.global_batch,
        bytes_of_gradient=4 if record.grad_dtype == "fp32" else 2,
        stack=stack_of(record),
    )
    row = Row(_SOURCE, job, _topology(record), candidate, is_fit=False)
    row.measured["seconds"] = record.step_seconds.median
    if record.peak_memory_gib:
        row.measured["memory_gib"] = record.peak_memory_gib.max
    return row


def stack_of(record: RunRecord) -> Stack:
    """What the record's kernels were."""
    kernels = record.kernels or {}
    activation, loss = kernels.get("activation", ""), kernels.get("cross_entropy", "")
    return Stack(
        fused="unfused" not in activation,
        fused_loss="linear_cross_entropy" in loss,
        fuses_weight_gradient=kernels.get("weight_gradient") == "apex",
    )


def _candidate(record: RunRecord) -> Candidate:
    layout, options = record.layout, record.options
    placement = record.placement.policy if record.placement else "topology"
    return Candidate(
        cast(EngineName, record.engine),
        Layout(tp=layout.tp, cp=layout.cp, pp=layout.pp, vp=layout.vp, dp=layout.dp),
        record.micro_batch,
        recompute=cast(Recompute, options.get("recompute", "none")),
        placement=cast(Policy, placement),
        zero_stage=options.get("zero_stage") or (3 if record.engine == "deepspeed" else 1),
        offload=cast(Offload, options.get("offload") or "none"),
        shard_size=options.get("shard_size"),
        hpz_size=options.get("hpz_size"),
    )


def _topology(record: RunRecord) -> Topology:
    """Equal hosts, emulated or not, with NVLink inside; between them what the run itself measured."""
    hosts = record.num_hosts or 1
    measured = record.link_bandwidth
    host = Host(
        name="host",
        device=record.device or "",
        inside="pcie",
        network="socket",
        network_gbits=measured.all_gather_gb_per_s * 8 if measured else None,
        nvlink_gb_per_s=450.0,
    )
    size = record.world_size // hosts
    return build([(host, size, size)] * hosts)
