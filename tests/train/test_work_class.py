"""Two runs are comparable only if all settings of role "work" are equal."""

from pathlib import Path
from typing import Any

import pytest

from megabench.config import SETTINGS, RunConfig
from megabench.data.source import open_source
from megabench.record import WorkClass
from megabench.settings.setting import names
from megabench.specs.fp8_check import FP8_SETTINGS
from megabench.train.run_record import work_class

BASE: dict[str, Any] = {"model": "llama-tiny", "data": "stdlib", "steps": 10, "seq_length": 64}
OTHER: dict[str, Any] = {
    "model": "qwen3-tiny",
    "num_layers": 1,
    "data": "synthetic",
    "seed": 2,
    "data_seed": 3,
    "seq_length": 32,
    "global_batch": 64,
    "steps": 12,
    "optimizer": "sgd",
    "lr": 0.123,
    "lr_warmup": 3,
    "min_lr": 1e-7,
    "schedule": "linear",
    "decay_steps": 2,
    "betas": (0.8, 0.9),
    "eps": 1e-3,
    "weight_decay": 0.2,
    "clip_grad": 2.0,
    "param_groups": "norm: lr_scale=2",
    "precision": "bf16",
    "grad_dtype": "bf16",
    "fp8_recipe": "bf16-gradients",
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
}
# what these settings need
NEEDED: dict[str, dict[str, Any]] = {name: {"precision": "fp8"} for name in FP8_SETTINGS} | {
    "grad_dtype": {"precision": "bf16"},
    "decay_steps": {"schedule": "wsd", "lr_warmup": 0},
}


def class_of(**fields: Any) -> WorkClass:
    run = RunConfig.parse(BASE | fields).resolve(1, "cpu")
    return work_class(run, open_source(run))


@pytest.mark.parametrize("name", sorted({*names(SETTINGS, role="work")} - {"tokenizer"}))
def test_another_value_is_another_work_class(name: str) -> None:
    same = NEEDED.get(name, {})
    assert class_of(**same) == class_of(**same)
    assert class_of(**same | {name: OTHER[name]}) != class_of(**same)


def test_another_tokenizer_is_another_work_class(tokenizer_dir: Path) -> None:
    assert class_of(tokenizer=str(tokenizer_dir)) != class_of()
