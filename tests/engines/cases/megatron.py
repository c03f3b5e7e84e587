"""megatron's cases; see the package."""

from typing import Any

from megabench.specs.all_settings import engines_with

IN_BF16: list[dict[str, Any]] = [{"tp": 2}]
ON_GPUS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2, "micro_batch": 2}),
    "tp2-recompute": (2, {"tp": 2, "recompute": "full"}),
    "pp2": (2, {"pp": 2}),
    "pp2-vp2": (2, {"pp": 2, "vp": 2}),
    "cp2": (2, {"cp": 2, "micro_batch": 2}),
    "cp2-in-chunks": (2, {"model": "llama3-8b-wide-mqa", "cp": 2}),
    "tp2-reference-kernels": (2, {"tp": 2, "kernels": "reference"}),
    "tp2-keep-gathered": (2, {"tp": 2, "keep_gathered": True}),
    "tp2-copy-engines": (2, {"tp": 2, "tp_overlap": "copy-engines"}),
    "tp2-recompute-copy-engines": (2, {"tp": 2, "recompute": "full", "tp_overlap": "copy-engines"}),
    "tp4": (4, {"tp": 4}),
    "tp4-copy-engines": (4, {"tp": 4, "tp_overlap": "copy-engines"}),
    "tp2-pp2-vp2-copy-engines": (4, {"tp": 2, "pp": 2, "vp": 2, "tp_overlap": "copy-engines"}),
    "tp4-keep-gathered": (4, {"tp": 4, "keep_gathered": True}),
    "pp4": (4, {"pp": 4}),
    "cp4": (4, {"cp": 4}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "tp2-dp2": (4, {"tp": 2}),
    "pp2-vp2-dp2": (4, {"pp": 2, "vp": 2}),
    "dp4": (4, {}),
    "dp4-shards-of-2": (4, {"shard_size": 2}),
    "tp8": (8, {"tp": 8}),
    "tp4-pp2": (8, {"tp": 4, "pp": 2}),
    "tp2-pp2-dp2": (8, {"tp": 2, "pp": 2}),
}
# the engines that compile, whichever they are, as an error message lists them
_COMPILING = "(?:, | and )".join(engines_with("compile")) + " engine" + "s" * (len(engines_with("compile")) > 1)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero_leaf_layers": True}, "zero_leaf_layers is a setting of the deepspeed engine"),
    ({"optimizer": "adafactor"}, "needs whole matrices on every rank, but the megatron engine shards them"),
    ({"optimizer": "muon"}, "optimizer=muon needs whole matrices on every rank, but the megatron engine shards them"),
    ({"keep_gathered": True}, "use tp=2 or more and kernels=auto"),
    ({"tp": 2, "keep_gathered": True, "kernels": "reference"}, "use tp=2 or more and kernels=auto"),
    ({"tp_overlap": "copy-engines"}, "tp_overlap=copy-engines needs .* use tp=2 or more and kernels=auto"),
    ({"tp": 2, "tp_overlap": "copy-engines", "keep_gathered": True}, "share the memory .* omit one of them"),
    (
        {"tp": 2, "keep_gathered": True, "precision": "fp8", "fp8_recipe": "bf16-gradients"},
        "omit keep_gathered, or use fp8_recipe=tensorwise",
    ),
    ({"shard_size": 3}, r"must divide the 4 ranks and be a multiple of tp=1; use one of \[1, 2, 4\]"),
    ({"tp": 2, "shard_size": 1}, r"be a multiple of tp=2; use one of \[2, 4\]"),
    ({"pp": 2, "shard_size": 4}, r"must divide the 2 ranks of a pipeline stage"),
    ({"compile": True}, f"compile is a setting of the {_COMPILING}, and the engine is megatron"),
]
RESUMED: list[dict[str, Any]] = [{"shard_size": 2, "param_groups": "norm: lr_scale=2; embed: weight_decay=0.5"}]
KERNELS: dict[str, dict[str, Any]] = {
    "llama": {"model": "llama3-8b"},
    "llama-reference": {"model": "llama3-8b", "kernels": "reference"},
    "heads": {"model": "llama3-8b", "cp": 2, "tp": 2},
    "chunks": {"model": "llama3-8b", "cp": 8},
}
PARAM_GROUPS = [{"tp": 2}, {"pp": 2}, {}]
