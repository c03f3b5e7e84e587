"""Settings that several engines share."""

from typing import Any

from megabench.settings.setting import setting

RESHARD_AFTER_FORWARD: Any = setting(
    True,
    "Release a layer's gathered weights after forward and gather them again for backward (fsdp, ZeRO-3).",
    panel="Engine and layout",
    role="option",
    resume="free",
    label="weights kept",
)
OFFLOAD: Any = setting(
    "none",
    "State kept in host memory: the optimizer's (deepspeed), or all state (ZeRO-3 and fsdp).",
    panel="Engine and layout",
    role="option",
    resume="free",
    synonyms=("cpu_offload", "offload_optimizer"),
    label="offload {}",
)
COMPILE: Any = setting(
    False,
    "Compile the blocks of fsdp and ddp with torch.compile.",
    panel="Precision and kernels",
    role="option",
    resume="free",
    synonyms=("torch_compile",),
    label="compiled",
)
