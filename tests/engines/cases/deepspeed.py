"""DeepSpeed's cases; see the package."""

from pathlib import Path
from typing import Any

_CONFIGS = Path(__file__).parents[3] / "configs" / "deepspeed"
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero2-reduce": (
        4,
        {"engine": "deepspeed", "zero_stage": 2, "deepspeed_config": _CONFIGS / "reduce-to-owner.json"},
    ),
    "zero3-offload-all": (2, {"engine": "deepspeed", "zero_stage": 3, "offload": "all"}),
    "zero3-offload-optimizer": (2, {"engine": "deepspeed", "zero_stage": 3, "offload": "optimizer"}),
    "zero2-offload": (2, {"engine": "deepspeed", "zero_stage": 2, "offload": "optimizer"}),
    "zero1-offload": (2, {"engine": "deepspeed", "zero_stage": 1, "offload": "optimizer"}),
    "zero3-hpz": (4, {"engine": "deepspeed", "hpz_size": 2}),
    "zero3-tuned": (2, {"engine": "deepspeed", "zero_prefetch": 1000, "zero_persistence": 100}),
    "zero3-leaf": (2, {"engine": "deepspeed", "zero_leaf_layers": True, "zero_prefetch": 1000, "recompute": "full"}),
    "zero3-leaf-hpz": (4, {"engine": "deepspeed", "zero_leaf_layers": True, "hpz_size": 2}),
    "zero3-kept": (2, {"engine": "deepspeed", "reshard_after_forward": False, "micro_batch": 2}),
    "zero3-leaf-kept": (2, {"engine": "deepspeed", "zero_leaf_layers": True, "reshard_after_forward": False}),
    "zero3-leaf-offload": (2, {"engine": "deepspeed", "zero_leaf_layers": True, "offload": "all"}),
}
IN_BF16: list[dict[str, Any]] = [
    {"engine": "deepspeed", "zero_stage": 1},
    {"engine": "deepspeed", "zero_stage": 3},
]
ON_GPUS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (2, {"engine": "deepspeed", "zero_stage": 1}),
    "zero2": (2, {"engine": "deepspeed", "zero_stage": 2}),
    "zero3": (2, {"engine": "deepspeed", "zero_stage": 3}),
    "zero3-tuned": (2, {"engine": "deepspeed", "zero_prefetch": 100_000_000, "zero_persistence": 1_000_000}),
    "zero3-leaf": (2, {"engine": "deepspeed", "zero_leaf_layers": True, "zero_prefetch": 100_000_000}),
    "zero3-kept": (2, {"engine": "deepspeed", "zero_leaf_layers": True, "reshard_after_forward": False}),
    "zero3-of-four": (4, {"engine": "deepspeed", "zero_stage": 3}),
    "zero3-hpz": (4, {"engine": "deepspeed", "hpz_size": 2}),
}
WHOLE_MATRICES: list[dict[str, Any]] = [{"engine": "deepspeed", "zero_stage": 0}]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"engine": "deepspeed", "zero_stage": 2, "offload": "all"}, "offload=all needs zero_stage=3"),
    ({"engine": "deepspeed", "zero_stage": 0, "offload": "optimizer"}, "needs zero_stage 1 to 3"),
    ({"engine": "deepspeed", "zero_stage": 2, "hpz_size": 2}, "hpz_size=2 works only with zero_stage=3, not 2"),
    ({"engine": "deepspeed", "zero_stage": 1, "zero_leaf_layers": True}, "works only with zero_stage=3, not 1"),
    ({"engine": "deepspeed", "hpz_size": 3}, "hpz_size=3 does not divide the 4 ranks"),
    ({"engine": "deepspeed", "optimizer": "adafactor"}, "ZeRO-3 of the deepspeed engine shards them"),
    ({"engine": "deepspeed", "zero_stage": 1, "optimizer": "muon"}, "ZeRO-1 of the deepspeed engine shards them"),
    (
        {"engine": "deepspeed", "zero_stage": 0, "optimizer": "muon", "save": Path("x")},
        "checkpoints of zero_stage=0 do not contain Muon's state; use --engine ddp",
    ),
]
KERNELS: dict[str, dict[str, Any]] = {
    "zero3": {"model": "llama3-8b", "engine": "deepspeed"},
    "zero3-reference": {"model": "llama3-8b", "engine": "deepspeed", "kernels": "reference"},
}
OUT_OF_MEMORY: list[tuple[dict[str, Any], str]] = [
    ({"engine": "deepspeed", "options": {"zero_stage": 1}}, "zero_stage: 3"),
    ({"engine": "deepspeed", "options": {"zero_stage": 3, "offload": "none"}}, "offload: all"),
]
PARAM_GROUPS = [{"engine": "deepspeed", "zero_stage": stage} for stage in range(4)]
