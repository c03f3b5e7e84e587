"""The publications that the validation scores, and the settings of their training software.

`SOURCES` contains facts of each source's program. No value in it is fitted. This module does not import torch.
"""

from dataclasses import dataclass, replace

from megabench.cost.job import Recompute
from megabench.hardware.gpus import Network
from tools.planner_validation.programs import Program


@dataclass(frozen=True)
class Source:
    """A publication and the settings of its training software. `part` is a substring of the publication's name.

    `fits` permits fits to the publication's single-node rows. `gradient` is the number of bytes per gradient element.
    `unstated_recompute` is the recomputation mode for rows without this field; None omits these rows.
    `recomputes_attention` says whether "selective" means the attention of every layer, as in Megatron. Otherwise it
    means whole layers, of which the source does not state the number, and these rows are omitted.
    `first_rank_memory` says whether the published peak memory is that of rank 0 or that of the fullest rank.
    """

    name: str
    part: str
    program: Program
    network: Network
    fits: bool = False
    zero_stage: int = 0
    gradient: int = 4
    unstated_recompute: Recompute | None = None
    recomputes_attention: bool = True
    first_rank_memory: bool = False


MEGATRON_2021 = Program(
    flash_attention=False,
    sequence_parallel=False,
    dropout=True,
    overlaps_gradients=False,
    overlaps_parameters=False,
)
MEGATRON_2022 = replace(MEGATRON_2021, sequence_parallel=True)
# nanotron 0.5 uses flash attention, sequence parallelism, full logits, and fp32 gradient accumulation after each
# backward pass. Without ZeRO-1, every stage reduces gradients in 25 MB bf16 buckets, like torch's DDP. With ZeRO-1,
# nanotron does not use DDP (trainer.py), and reduces gradients and gathers weights after the step without overlap.
_NANOTRON = Program(
    flash_version=2,
    fused=False,
    launches_forward=42,
    overlaps_parameters=False,
    overlaps_sharded_gradients=False,
    fuses_weight_gradient=False,
    bucket_parameters=12.5e6,
    buckets_on_all_stages=True,
    fills_stages=True,
    accumulates_at_end=True,
    copies_kept=True,
    holds_sent=True,
    flattens_shards=True,
    sliced_tensors=6,
)
NEMO = Program(
    passes_keys=True,
    exchanges_heads=False,
    fuses_fp8_weight_gradient=True,
    delayed_scaling=True,
    blocking_p2p=False,
    user_buffers=True,
)
# `loss_bytes` is the memory traffic of the loss in bytes per logit, in forward and in backward.
# llm-foundry uses flash-attn's 16-bit loss: forward reads 2 bytes, backward reads 2 and writes 2.
# torch's loss moves 22 bytes in forward: 2 + 4 for the cast, and 16 for maximum, sum and logarithm. In backward, it
# moves 4 bytes to fill the gradient with zeros, 16 to compute it and 2 to cast it.
# Its runs on one host are older than FlashAttention-2: version 0.2.0 with torch 2.0 (h100_benchmarks.sh).
_FOUNDRY = Program(
    flash_version=1,
    fused=False,
    launches_forward=42,
    loss_bytes=(2, 4),
    flat_parameters=True,
)
_FSDP = replace(_FOUNDRY, flash_version=2, loss_bytes=(22, 22))
_TITAN = replace(_FSDP, flat_parameters=False)


def _nemo(name: str, part: str) -> Source:
    return Source(name, part, NEMO, "infiniband", zero_stage=1, gradient=2, unstated_recompute="none")


# Rank 0 writes the table of the sweep (nanotron's log_throughput) in the third or fourth step of a run.
SWEEP = Source(
    "playbook sweep", "Ultra-Scale", _NANOTRON, "efa", fits=True, unstated_recompute="none", first_rank_memory=True
)
SOURCES = (
    SWEEP,
    Source("vTrain", "vTrain", MEGATRON_2021, "infiniband", fits=True),
    Source("llm-foundry", "llm-foundry", _FOUNDRY, "infiniband", fits=True, zero_stage=3, gradient=2),
    Source("SC21 table 1", "2104.04473 Table 1", MEGATRON_2021, "infiniband"),
    Source("Korthikanti", "2205.05198 Table 5", MEGATRON_2021, "infiniband"),
    Source(
        "torchtitan",
        "torchtitan@3faaa1a0d:docs/performance.md",
        _TITAN,
        "infiniband",
        zero_stage=3,
        recomputes_attention=False,
    ),
    _nemo("NeMo 24.11 to 25.02, 8B", "llama3.1/README_8b"),
    _nemo("NeMo 24.11 to 25.02, 405B", "llama3.1/README_405b"),
    _nemo("NeMo 24.11 to 25.02, 175B", "nemo_megatron/README_175b"),
    _nemo("NeMo 25.04, 8B to 405B", "dgxc-benchmarking@v25.04"),
    Source(
        "PyTorch FSDP", "pytorch.github.io", _FSDP, "infiniband", zero_stage=3, gradient=2, recomputes_attention=False
    ),
)
