"""Settings that several engines declare alike."""

from typing import Any

from megabench.settings.setting import setting

RESHARD_AFTER_FORWARD: Any = setting(
    True,
    "Whether fsdp and ZeRO-3 drop a layer's weights after forward, to gather them again for backward.",
    panel="Engine and layout",
    role="option",
    resume="free",
    label="weights kept",
)
OFFLOAD: Any = setting(
    "none",
    "What deepspeed and fsdp keep in host memory: the optimizer (deepspeed), or all (ZeRO-3, fsdp).",
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
