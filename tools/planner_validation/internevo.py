"""Conversion of InternEvo's published scaling runs into validation rows. This module does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megabench.cost.job import Candidate
from megabench.parallel.layout import Layout
from megabench.planner.engines.megatron_memory import MegatronVariant
from tools.planner_validation.programs import Program, ProgramJob
from tools.planner_validation.published import Row, model_shape, read_table, topology_of
from tools.planner_validation.sources import Source

# From InternEvo's hybrid_zero_optim.py and configs/7B_sft.py: FlashAttention-2, no sequence parallelism, no fused
# element-wise kernels, bf16 gradients that are reduced during backward in buckets of 512 Mi elements, and weights that
# are broadcast after the step without overlap.
_PROGRAM = Program(
    flash_version=2,
    sequence_parallel=False,
    fused=False,
    launches_forward=42,
    overlaps_parameters=False,
    fuses_weight_gradient=False,
    bucket_parameters=512 * 2**20,
    broadcasts_tensors=True,
)
_SOURCES = {
    True: Source("InternEvo, optimizer sharded over all ranks", "", _PROGRAM, "infiniband", gradient=2),
    False: Source("InternEvo, optimizer sharded inside nodes", "", _PROGRAM, "infiniband", gradient=2),
}


def read_internevo(path: Path) -> list[Row]:
    """Read the runs of a CSV file. Raise DataError if the file is not readable."""
    return [_row(line) for line in read_table(path)]


def without_facts(rows: Sequence[Row]) -> list[Row]:
    """Return the runs as if their program were like Megatron-LM, without what is known of InternEvo."""
    source = Source("InternEvo, without facts of its program", "", Program(), "infiniband", gradient=2)
    jobs = [replace(row.job, stack=source.program) for row in rows]
    return [replace(row, source=source, job=job) for row, job in zip(rows, jobs, strict=True)]


def _row(line: Mapping[str, str]) -> Row:
    gpus, tp, dp, shards = (int(line[name]) for name in ("gpus", "tp", "dp", "zero1_shard_ranks"))
    source = _SOURCES[shards == dp]
    job = ProgramJob(
        model_shape(line),
        int(line["seq"]),
        int(line["global_batch"]),
        bytes_of_gradient=source.gradient,
        stack=source.program,
    )
    variant = MegatronVariant(shard_size=shards * tp if shards < dp else None)
    candidate = Candidate("megatron", Layout(tp=tp, dp=dp), int(line["micro_batch"]), variant)
    seconds = job.tokens / float(line["tokens_per_second_per_gpu"]) / gpus
    topology = topology_of(source, line, "NVIDIA A100-SXM4-80GB", gpus, int(line["gpus_per_node"]))
    return Row(source, job, topology, candidate, is_fit=False, measured={"seconds": seconds})
