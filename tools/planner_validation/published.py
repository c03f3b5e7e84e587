"""Conversion of published measurements into validation rows. This module does not import torch.

The tables in data/ are compressed CSV files, and each of their rows names its source.
"""

import csv
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from megabench.cost.fabric import Fabric
from megabench.cost.job import Candidate, Job, Recompute
from megabench.errors import UserError
from megabench.hardware.topology import Host, Topology, build
from megabench.models.shape import ModelShape
from megabench.parallel.layout import Layout
from megabench.planner.engines.megatron_memory import MegatronVariant
from megabench.planner.engines.sharding import Sharding
from tools.planner_validation.programs import ProgramJob
from tools.planner_validation.sources import MEGATRON_2021, MEGATRON_2022, NEMO, SOURCES, Source

Kind = Literal["seconds", "memory_gib", "oom"]


DATA = Path(__file__).with_name("data")


class DataError(UserError):
    """Error for a file that does not contain published measurements."""


_GPUS = {
    "H100-80GB-SXM": "NVIDIA H100 80GB HBM3",
    "H100-80GB": "NVIDIA H100 80GB HBM3",
    "A100": "NVIDIA A100-SXM4-80GB",
    "A100-80GB": "NVIDIA A100-SXM4-80GB",
    "A100-80GB-SXM": "NVIDIA A100-SXM4-80GB",
    "A100-40GB": "NVIDIA A100-SXM4-40GB",
}
_NVLINK_GB_PER_S = {"H100": 450.0, "A100": 300.0}
# Network bandwidth per host for rows that state no bandwidth: eight 400 Gbit/s ports on H100 hosts, which is also the
# EFA bandwidth of p5 (the sweep's cluster), and eight 200 Gbit/s ports on A100 hosts.
_GBITS = {"H100": 3200.0, "A100": 1600.0}
_VOCABULARY = 51200  # Megatron-LM's padded GPT-2 vocabulary


@dataclass
class Row:
    """One published configuration and its measurements.

    `is_fit` says whether constants are fitted to the row. `fabric` holds collectives measured on the run's own nodes.
    """

    source: Source
    job: Job
    topology: Topology
    candidate: Candidate
    is_fit: bool
    measured: dict[Kind, float] = field(default_factory=dict)
    fabric: Fabric | None = None

    @property
    def group(self) -> tuple[str, str, str, int]:
        """Group key of comparable rows: source, model, GPU type and number of GPUs."""
        return self.source.name, self.job.shape.name, self.topology.hosts[0].device, self.topology.world_size

    @property
    def is_refused(self) -> bool:
        """Whether the training program rejects the configuration, regardless of memory.

        The nanotron program adds blocks to a pipeline stage until the stage reaches its share of the total cost, and
        then starts the next stage. The last block, the loss, must be on the last stage (nanotron's models/base.py).
        With many stages, nanotron places the last block on an earlier stage, and the run fails. If the cost of a
        stage equals its share exactly, the next block starts the next stage, as the sweep's parameter counts show.
        """
        if not (isinstance(self.job, ProgramJob) and self.job.stack.fills_stages):
            return False
        num_stages, output = self.candidate.layout.pp, self.job.output_layers
        part = (self.job.shape.num_layers + output) / num_stages
        stage, passed, found = 0, 0.0, 0
        # cost of each block: the layers, the norm, the output layer, the cast and the loss
        for cost in (*[1.0] * self.job.shape.num_layers, 0.0, output, 0.0, 0.0):
            passed, found = passed + cost, stage
            if passed >= part * (stage + 1) * (1 - 1e-9) and stage < num_stages - 1:
                stage += 1
        return found < num_stages - 1


def read_rows(path: Path) -> list[Row]:
    """Read the configurations that the planner supports. Raise DataError if the file is not a table of runs."""
    table = read_table(path)
    found: dict[tuple[object, ...], Row] = {}
    for line in table:
        if "source" not in line or "metric" not in line:
            raise DataError(f"{path} has no columns source and metric. Use tables like those in {DATA}.")
        source = next((source for source in SOURCES if source.part in line["source"]), None)
        row = row_of(source, line) if source else None
        measured = _measured(line, row) if row else None
        if row and measured:
            key = (
                row.group,
                row.job.seq_length,
                row.job.global_batch,
                row.candidate,
                row.job.stack,
                row.job.precision,
                row.topology,
            )
            _add(found.setdefault(key, row), *measured)
    return list(found.values())


def check_sources(rows: Sequence[Row], path: Path) -> None:
    """Raise DataError if a source has no row, for example because its file names a GPU differently."""
    found = {row.source.name for row in rows}
    if missing := [source for source in SOURCES if source.name not in found]:
        names = ", ".join(f"{source.name} ({source.part})" for source in missing)
        raise DataError(f"{path} has no usable row of {names}. Correct SOURCES in sources.py, or the file.")


def _add(row: Row, kind: Kind, value: float) -> None:
    """Add a measurement. Of repeated runs, keep the shortest step time and the largest peak memory."""
    known = row.measured.get(kind, value)
    row.measured[kind] = min(known, value) if kind == "seconds" else max(known, value)


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the lines of a CSV file compressed by xz as dictionaries. Raise DataError if the file is unreadable."""
    try:
        with lzma.open(path, "rt", newline="", encoding="utf-8") as lines:
            return list(csv.DictReader(lines))
    except (OSError, lzma.LZMAError) as error:
        raise DataError(f"cannot read {path}: {error}. Use tables like those in {DATA}.") from None


def row_of(source: Source, line: Mapping[str, str]) -> Row | None:
    recompute = cast(Recompute, line["recompute"] or source.unstated_recompute)
    needed = ("layers", "hidden", "heads", "seq", "gpus", "tp", "pp", "micro_batch", "global_batch")
    gpu = _GPUS.get(line["gpu"])
    if not all(line[name] for name in needed) or gpu is None or recompute not in ("none", "selective", "full"):
        return None
    precision = "fp8" if line["precision"] == "fp8" and source.program is NEMO else "bf16"
    if recompute == "selective" and not source.recomputes_attention:
        return None
    if line["precision"] not in ("bf16", "fp16", "") and precision != "fp8":
        return None
    if "CPU offload=True" in line["note"]:
        return None
    gpus, tp, pp, cp = (int(line[name] or 1) for name in ("gpus", "tp", "pp", "cp"))
    layout = Layout(tp=tp, cp=cp, pp=pp, vp=int(line["vp"] or 1), dp=gpus // (tp * pp * cp))
    zero = int(line["zero_stage"] or source.zero_stage)
    engine: Literal["fsdp", "megatron"] = "fsdp" if zero == 3 else "megatron"
    if (engine == "fsdp" and tp * pp * cp > 1) or layout.world_size != gpus:
        return None
    variant = Sharding(zero) if engine == "fsdp" else MegatronVariant(shards_optimizer=zero > 0)
    candidate = Candidate(engine, layout, int(line["micro_batch"]), variant, recompute)
    global_batch = int(line["global_batch"])
    if global_batch % (candidate.micro_batch * layout.data_parallel):
        return None
    program = source.program
    if recompute == "selective" and program is MEGATRON_2021:
        program = MEGATRON_2022
    job = ProgramJob(
        model_shape(line),
        int(line["seq"]),
        global_batch,
        precision=precision,
        bytes_of_gradient=source.gradient,
        stack=program,
    )
    nodes = int(line["gpus_per_node"] or 8)
    topology = topology_of(source, line, gpu, gpus, nodes)
    return Row(source, job, topology, candidate, is_fit=source.fits and gpus <= nodes)


def model_shape(line: Mapping[str, str]) -> ModelShape:
    hidden, heads = int(line["hidden"]), int(line["heads"])
    is_llama = line["model"].startswith(("llama", "internlm"))
    shape = ModelShape(
        name=line["model"],
        family="llama" if is_llama else "gpt2",
        num_layers=int(line["layers"]),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(line["kv_heads"] or heads) if is_llama else heads,
        head_dim=hidden // heads,
        ffn_size=int(line["ffn"] or 4 * hidden),
        vocab_size=int(line["vocab"] or _VOCABULARY),
        norm_eps=1e-5,
        seq_length=int(line["seq"]),
        micro_batch=1,
        global_batch=1,
        learning_rate=1e-4,
        lr_warmup=0,
        source=line["source"],
        tied_embeddings=not is_llama,
    )
    return replace(shape, tied_embeddings=True) if _is_tied(shape, line.get("params_b", "")) else shape


def _is_tied(shape: ModelShape, stated_billions: str) -> bool:
    """Return whether the stated number of parameters (in billions) fits tied embeddings better than untied ones."""
    if not stated_billions:
        return shape.tied_embeddings
    stated, tied = float(stated_billions) * 1e9, replace(shape, tied_embeddings=True)
    return abs(tied.num_parameters - stated) < abs(shape.num_parameters - stated)


def topology_of(source: Source, line: Mapping[str, str], gpu: str, gpus: int, per_node: int) -> Topology:
    chip = "H100" if "H100" in gpu else "A100"
    stated = line["inter_node_gbps_per_node"]
    hosts = max(1, gpus // per_node)
    host = Host(
        name="node",
        device=gpu,
        inside="pcie",
        network=source.network,
        network_gbits=float(stated) if stated else _GBITS[chip],
        nvlink_gb_per_s=_NVLINK_GB_PER_S[chip],
    )
    size = min(gpus, per_node)
    return build([(host, size, size)] * hosts)


def _measured(line: Mapping[str, str], row: Row) -> tuple[Kind, float] | None:
    """Return the kind and the value of a measurement: step seconds, GiB, or an OOM failure. Return None otherwise."""
    value, metric = float(line["value"]), line["metric"]
    if metric == "step_time_s":
        return "seconds", value
    if metric == "tokens_per_s_per_gpu":
        return "seconds", row.job.tokens / value / row.candidate.layout.world_size
    if metric == "hw_tflops_per_gpu":
        return "seconds", _sc21_flops(row.job) / (value * 1e12 * row.candidate.layout.world_size)
    if metric == "peak_mem_gb":
        return "memory_gib", value
    if metric == "oom_or_crash":
        return "oom", 1.0
    return None


def _sc21_flops(job: Job) -> float:
    """Return the FLOPs of a step with recomputation: 96·B·S·L·H²·(1 + S/6H + V/16LH), from arXiv 2104.04473."""
    shape, seq = job.shape, job.seq_length
    h, layers = shape.hidden_size, shape.num_layers
    scale = 1 + seq / (6 * h) + shape.vocab_size / (16 * layers * h)
    return 96 * job.global_batch * seq * layers * h * h * scale
