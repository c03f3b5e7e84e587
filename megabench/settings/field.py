"""The values of settings that several packages name."""

from typing import Literal

EngineName = Literal["megatron", "deepspeed", "fsdp", "ddp"]
Precision = Literal["bf16", "fp16", "fp32"]
