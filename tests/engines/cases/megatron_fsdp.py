"""Megatron-FSDP's cases; see the package."""

from typing import Any

OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "megatron-fsdp-across": (4, {"engine": "megatron_fsdp", "shard_size": 2}),
    "megatron-fsdp-two-of-four": (8, {"engine": "megatron_fsdp", "shard_size": 4, "global_batch": 8}),
    "megatron-fsdp-four-of-two": (8, {"engine": "megatron_fsdp", "shard_size": 2, "global_batch": 8}),
    "megatron-fsdp-ones": (2, {"engine": "megatron_fsdp", "shard_size": 1}),
    "megatron-fsdp-recompute": (2, {"engine": "megatron_fsdp", "recompute": "full"}),
}
IN_BF16: list[dict[str, Any]] = [{"engine": "megatron_fsdp"}]
ON_GPUS: dict[str, tuple[int, dict[str, Any]]] = {
    "megatron-fsdp-one": (1, {"engine": "megatron_fsdp"}),
    "megatron-fsdp": (2, {"engine": "megatron_fsdp"}),
    "megatron-fsdp-across": (4, {"engine": "megatron_fsdp", "shard_size": 2}),
}
RESUMED: list[dict[str, Any]] = [{"engine": "megatron_fsdp"}, {"engine": "megatron_fsdp", "shard_size": 2}]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"engine": "megatron_fsdp", "shard_size": 3}, "does not divide the 4 ranks"),
]
OUT_OF_MEMORY: list[tuple[dict[str, Any], str]] = [
    ({"engine": "megatron_fsdp", "options": {"shard_size": 2}}, "a larger shard_size"),
]
PARAM_GROUPS = [{"engine": "megatron_fsdp"}]
