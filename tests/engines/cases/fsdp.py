"""FSDP2's cases; see the package."""

from typing import Any

OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp-offload": (2, {"engine": "fsdp", "offload": "all"}),
    "fsdp-compile": (2, {"engine": "fsdp", "compile": True, "num_layers": 1}),
}
IN_BF16: list[dict[str, Any]] = [{"engine": "fsdp"}]
ON_GPUS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {"engine": "fsdp"}),
    "fsdp-kept": (2, {"engine": "fsdp", "reshard_after_forward": False}),
    "fsdp-offload": (2, {"engine": "fsdp", "offload": "all"}),
    "hsdp": (4, {"engine": "fsdp", "shard_size": 2}),
}
RESUMED: list[dict[str, Any]] = [{"engine": "fsdp"}, {"engine": "fsdp", "shard_size": 2}]
REFUSED: list[tuple[dict[str, Any], str]] = [({"engine": "fsdp", "offload": "optimizer"}, "use offload=all")]
KERNELS: dict[str, dict[str, Any]] = {
    "bloom": {"model": "bloom-560m", "engine": "fsdp"},
    "bloom-reference": {"model": "bloom-560m", "engine": "fsdp", "kernels": "reference"},
}
OUT_OF_MEMORY: list[tuple[dict[str, Any], str]] = [
    ({"engine": "fsdp", "options": {"shard_size": 2}}, "a larger shard_size"),
    ({"engine": "fsdp", "options": {"offload": "all", "recompute": "full"}}, "more GPUs"),
]
PARAM_GROUPS = [{"engine": "fsdp"}]
