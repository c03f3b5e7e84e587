"""Settings that several engines share."""

from typing import Any

from megabench.settings.setting import setting

RESHARD_AFTER_FORWARD: Any = setting(
    True,
    "Engine and layout",
    "option",
    "free",
    description="Release a layer's gathered weights after forward and gather them again for backward (fsdp, ZeRO-3).",
    label="weights kept",
)
SHARD_SIZE: Any = setting(
    None,
    "Engine and layout",
    "option",
    "free",
    description="Number of neighbouring ranks that share one copy of the weights (fsdp, megatron_fsdp) or of the "
    "optimizer state (megatron) [default: all ranks].",
    synonyms="data_parallel_shard_degree hsdp_shard_size",
    label="shards of {}",
)
OFFLOAD: Any = setting(
    "none",
    "Engine and layout",
    "option",
    "free",
    description="State kept in host memory: the optimizer's (deepspeed), or all state (ZeRO-3 and fsdp).",
    label="offload {}",
)
DEEPSPEED_CONFIG: Any = setting(
    None,
    "Engine and layout",
    "option",
    "free",
    description="A DeepSpeed JSON file, or the name of a shipped one (reduce-to-owner); its settings override "
    "megabench's.",
    label="own JSON",
)
KEEP_TRANSPOSED: Any = setting(
    True,
    "Precision and kernels",
    "option",
    "free",
    description="Keep fp8 weights transposed as well, for the backward pass. Otherwise each backward pass transposes "
    "them, and a parameter of a block needs 1 byte less (megatron, ddp, ZeRO-0 to ZeRO-2).",
    label="fp8 weights once",
)
COMPILE: Any = setting(
    False,
    "Precision and kernels",
    "option",
    "free",
    description="Compile the blocks of fsdp and ddp with torch.compile.",
    label="compiled",
)
