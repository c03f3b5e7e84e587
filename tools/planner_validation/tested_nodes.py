"""Runs of the playbook sweep, each with the NCCL test of its nodes. This module does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megabench.cost.fabric import Fabric, Kind
from tools.planner_validation.collectives import tested
from tools.planner_validation.published import Row, read_table, row_of
from tools.planner_validation.sources import SWEEP

# the columns of the test's bus bandwidths
_COLUMNS: dict[Kind, str] = {
    "all_reduce": "AllReduce (GB/s)",
    "all_gather": "AllGather (GB/s)",
    "reduce_scatter": "ReduceScatter (GB/s)",
}
_GPUS_PER_NODE = 8
# by hidden size, as the sweep's other table states them; the last one is that of Llama 3.1 405B
_FFN_SIZES = {2048: 8192, 3072: 8192, 4096: 14336, 8192: 28672, 16384: 53248}
_HEALTHY_SHARE = 0.5  # the least bandwidth of healthy nodes, as a share of the 95th percentile of equally many nodes


def read_tested(path: Path) -> list[Row]:
    """Read runs on several nodes, with the tests as their fabrics. Raise DataError if the file is not readable."""
    return [_row(line) for line in read_table(path)]


def on_healthy_nodes(rows: Sequence[Row]) -> list[Row]:
    """Return the runs on healthy nodes, without their NCCL tests. All `rows` are of the same number of nodes."""
    least = dict.fromkeys(_COLUMNS, 0.0)
    for kind in _COLUMNS:
        rates = sorted(_bandwidths(row)[kind] for row in rows)
        least[kind] = _HEALTHY_SHARE * rates[int(0.95 * (len(rates) - 1))]
    healthy = [row for row in rows if all(_bandwidths(row)[kind] >= rate for kind, rate in least.items())]
    return [replace(row, fabric=None) for row in healthy]


def _bandwidths(row: Row) -> dict[Kind, float]:
    """Return the bus bandwidth of each kind of collective in the NCCL test of a run's nodes, in GB/s."""
    assert row.fabric
    return {one.kind: one.bus_gb_per_s for one in row.fabric.collectives}


def _row(line: Mapping[str, str]) -> Row:
    nodes = int(float(line["nodes"]))
    row = row_of(SWEEP, _as_published(line, nodes))
    assert row is not None, "the planner supports all layouts of this table"
    seconds = row.job.tokens / float(line["tok/s/gpu"]) / row.candidate.layout.world_size
    shape = replace(row.job.shape, tied_embeddings=line["tie_word_embeddings"] == "True")
    collectives = tuple(tested(kind, nodes, _GPUS_PER_NODE, float(line[name])) for kind, name in _COLUMNS.items())
    fabric = Fabric(f"job {line['job_id']}", collectives)
    job = replace(row.job, shape=shape)
    return replace(row, job=job, is_fit=False, measured={"seconds": seconds}, fabric=fabric)


def _as_published(line: Mapping[str, str], nodes: int) -> dict[str, str]:
    """Return the line with the columns of published-runs.csv."""
    renamed = {
        "layers": "num_layers",
        "hidden": "hidden_size",
        "heads": "num_heads",
        "vocab": "vocab_size",
        "seq": "seq_len",
        "micro_batch": "mbs",
    }
    fields = dict.fromkeys(("vp", "cp", "params_b", "recompute", "inter_node_gbps_per_node", "note"), "")
    fields |= {name: line[column] for name, column in renamed.items()}
    fields |= {name: line[name] for name in ("source", "tp", "pp", "zero_stage")}
    return fields | {
        "model": f"llama {line['num_layers']}x{line['hidden_size']}",
        "kv_heads": str(int(float(line["num_kv_heads"]))),
        "ffn": str(_FFN_SIZES[int(line["hidden_size"])]),
        "global_batch": str(int(float(line["gbs"]))),
        "gpu": "H100-80GB-SXM",
        "gpus": str(nodes * _GPUS_PER_NODE),
        "gpus_per_node": str(_GPUS_PER_NODE),
        "precision": "bf16",
    }
