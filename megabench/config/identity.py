"""The identity of a trial, with which a resumed study finds its existing results. Loads no torch."""

import hashlib
from typing import Any

from megabench.config.run_config import RunConfig
from megabench.models.find import is_directory
from megabench.settings.setting import names
from megabench.specs.all_settings import SETTINGS, is_default

# The settings of version 0.1. An identity always contains these settings. A newer setting is part of an identity only
# if it differs from its default, so that identities of older studies stay the same.
_COMMON_0_1 = frozenset({
    "model", "num_layers", "engine", "tp", "pp", "vp", "cp", "placement", "strict_placement", "emulate_hosts",
    "seq_length", "micro_batch", "global_batch", "steps", "warmup_steps", "optimizer", "lr", "lr_warmup", "min_lr",
    "betas", "eps", "weight_decay", "clip_grad", "precision", "grad_dtype", "kernels", "recompute", "data", "tokenizer",
    "seed", "device", "load", "nan_tolerance", "world_size",
})  # fmt: skip
# Engine-specific settings and their defaults, which version 0.1 included in the identities of trials of all engines.
_OF_ENGINES_0_1: dict[str, Any] = {
    "stages": "balanced", "keep_gathered": False, "zero_stage": None, "shard_size": None, "reshard_after_forward": True,
    "offload": "none", "hpz_size": None, "zero_prefetch": None, "zero_persistence": None, "zero_leaf_layers": False,
    "powersgd_rank": None, "compile": False, "deepspeed_config": None,
}  # fmt: skip


def identity(run: RunConfig, **more: object) -> str:
    """Return the hash of `more` and of all settings that affect the result, i.e. no output paths and no monitoring."""
    settings = run.flat()
    left_out = {*names(SETTINGS, role="output"), *names(SETTINGS, role="watch")}
    newer = settings.keys() - _COMMON_0_1 - _OF_ENGINES_0_1.keys()
    left_out |= {name for name in newer if is_default(name, settings[name])}
    kept = {name: value for name, value in run.flat(mode="json").items() if name not in left_out}
    if run.tokenizer is None and not is_directory(run.model):
        kept["tokenizer"] = "bytes"  # the value of version 0.1, and still the tokenizer of these models
    fields = {**_OF_ENGINES_0_1, **kept, **run.spec.recorded(run.options), **more}
    return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]
