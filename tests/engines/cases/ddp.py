"""DDP's cases; see the package."""

from pathlib import Path
from typing import Any

OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp-compile": (2, {"engine": "ddp", "compile": True, "num_layers": 1})
}
IN_BF16: list[dict[str, Any]] = [{"engine": "ddp"}]
ON_GPUS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"engine": "ddp"}),
    "ddp-compile": (2, {"engine": "ddp", "compile": True}),
}
RESUMED: list[dict[str, Any]] = [{"engine": "ddp", "param_groups": "norm: lr_scale=2; embed: weight_decay=0.5"}]
WHOLE_MATRICES: list[dict[str, Any]] = [{"engine": "ddp"}]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"engine": "ddp", "offload": "all"}, "offload is a setting of the deepspeed and fsdp engines"),
    ({"engine": "fsdp", "powersgd_rank": 2}, "powersgd_rank is a setting of the ddp engine"),
    ({"engine": "ddp", "precision": "bf16", "grad_dtype": "bf16", "powersgd_rank": 2}, "powersgd_rank sends fp32"),
    ({"engine": "ddp", "powersgd_rank": 2, "save": Path("x")}, "do not include PowerSGD's error-feedback state"),
]
KERNELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model": "gpt2", "engine": "ddp"},
    "gpt2-reference": {"model": "gpt2", "engine": "ddp", "kernels": "reference"},
}
OUT_OF_MEMORY: list[tuple[dict[str, Any], str]] = [({"engine": "ddp", "options": {}}, "engine: fsdp")]
PARAM_GROUPS = [{"engine": "ddp"}]
