"""What the workers of tests/distributed.py share from the start: the imports that take seconds."""

import gc
import importlib
import warnings

warnings.simplefilter("ignore")

import torch.distributed  # noqa: E402, F401
import transformers.models.llama.modeling_llama  # noqa: E402, F401

from megabench.hardware.facts import visible_gpus  # noqa: E402

if not visible_gpus():  # libraries that look for GPUs start CUDA, which does not work in forked processes
    from megabench.runtime import megatron_cpu

    megatron_cpu.install()
    for engine in ("ddp", "deepspeed", "fsdp", "megatron", "megatron_fsdp"):
        importlib.import_module(f"megabench.engines.{engine}.engine")
    importlib.import_module("tests.engines.equivalence")

# The workers collect garbage after every job. They skip the modules that are loaded here, which takes 0.3 s less.
gc.collect()
gc.freeze()
