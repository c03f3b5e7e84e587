"""The settings of the program torchtitan, which are checked before any process starts."""

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megabench.config import ConfigError, RunConfig
from megabench.programs.torchtitan import toml_lines
from megabench.specs import torchtitan
from megabench.train.run_record import work_class

TINY: dict[str, Any] = {"engine": "torchtitan", "model": "llama-tiny", "device": "cpu"}


def resolve(world_size: int = 4, **fields: Any) -> Any:
    given = TINY | fields
    return RunConfig.parse(given).resolve(world_size, given["device"])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "job.toml"


def test_settings_of_the_file_are_settings_of_the_run(config: Path) -> None:
    config.write_text(
        """
[training]
seq_len = 256
local_batch_size = 2
global_batch_size = 16
max_norm = 0.5
steps = 100
mixed_precision_param = "bfloat16"

[optimizer]
lr = 1e-3
beta2 = 0.99

[lr_scheduler]
warmup_steps = 7

[parallelism]
tensor_parallel_degree = 2

[activation_checkpoint]
mode = "full"
"""
    )
    run = resolve(torchtitan_config=config, precision="bf16", steps=10)
    assert (run.seq_length, run.micro_batch, run.global_batch, run.clip_grad, run.steps) == (256, 2, 16, 0.5, 10)
    assert (run.lr, run.betas, run.lr_warmup, str(run.layout), run.recompute) == (
        1e-3,
        (0.9, 0.99),
        7,
        "tp2·dp2",
        "full",
    )


def test_a_pipeline_has_its_own_micro_batch(config: Path) -> None:
    config.write_text(
        "[training]\nlocal_batch_size = 8\n\n"
        "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 4\n"
    )
    assert resolve(torchtitan_config=config, global_batch=16).micro_batch == 4


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no TOML": ("[training", {}, "job.toml is not valid TOML"),
    "no section": ("training = 3", {}, r"is not in a section, e.g. \[training\]"),
    "a contradiction": (
        "[training]\nseq_len = 512",
        {"seq_length": 256},
        "sets seq_length=512, but the run sets seq_l",
    ),
    "an optimizer": ("[optimizer]\nname = 'Adam'", {}, "sets optimizer.name=Adam, but torchtitan is compared with"),
    "bf16 weights": ("[training]\ndtype = 'bfloat16'", {}, "sets training.dtype=bfloat16, but torchtitan has no fp32"),
    "a budget": ("[activation_checkpoint]\nmode = 'memory_budget'", {}, "use none, selective or full"),
    "replicas": (
        "[parallelism]\ndata_parallel_replicate_degree = 3",
        {},
        "do not fit the 4 data-parallel ranks of dp4",
    ),
    "no replica": ("[parallelism]\ndata_parallel_replicate_degree = 0", {}, "=0 in the TOML .* must be a whole number"),
    "text": ("[parallelism]\npipeline_parallel_degree = '2'", {}, "='2' in the TOML .* must be a whole number above 0"),
    "shards": (
        "[parallelism]\ndata_parallel_shard_degree = 8",
        {},
        "do not fit the 4 data-parallel ranks of dp4; omit",
    ),
    "DDP beside TP": (
        "[parallelism]\ndata_parallel_replicate_degree = 2",
        {"tp": 2, "precision": "fp32"},
        "torchtitan has no DDP beside TP or PP; omit",
    ),
    "passes": (
        "[training]\nlocal_batch_size = 3",
        {"pp": 2, "micro_batch": 2},
        "local_batch_size=3 must be a multiple of",
    ),
    "other converters": (
        "[model]\nconverters = ['quantize.linear.mx']",
        {},
        "is other work; use .*float8.*, or omit it",
    ),
    "no list": ("[model]\nconverters = true", {}, "model.converters=True is other work"),
    "own code": ("[experimental]\ncustom_import = 'mine'", {}, "but torchtitan runs no other code here; remove it"),
    "layers in bf16": (
        "[model]\nconverters = ['quantize.linear.float8']",
        {"device": "cuda", "num_layers_at_start_in_bf16": 1},
        "keeps layers in bf16 by quantize.linear.float8.filter_fqns; omit",
    ),
    "a dtype": (
        "[training]\nmixed_precision_param = 'bfloat16'",
        {"precision": "fp32"},
        "sets precision=bf16, but the run",
    ),
    "fp16": ("", {"precision": "fp16", "device": "cuda"}, "torchtitan has no precision=fp16; use bf16, fp8 or fp32"),
    "fp8 without a converter": ("", {"precision": "fp8"}, "use torchtitan_config=float8 and precision=fp8, or neither"),
    "bf16 without FSDP": (
        "",
        {"precision": "bf16", "tp": 4},
        "computes in fp32 with TP or PP but without FSDP; use dp=2",
    ),
    "no clipping": ("", {"clip_grad": 0}, "torchtitan always clips; use a large clip_grad"),
    "another family": ("", {"model": "qwen3-tiny"}, "torchtitan trains Llama, and .* is of the family qwen3"),
    "an odd sequence": (
        "",
        {"tp": 2, "cp": 2, "seq_length": 68, "precision": "fp32"},
        "divides the sequence by 2·tp·cp = 8",
    ),
    "checkpoints": ("", {"save": "checkpoints"}, "saves no checkpoints"),
    "other axes": ("", {"pp": 2, "vp": 2}, "vp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, config: Path) -> None:
    content, fields, message = REFUSED[case]
    config.write_text(content)
    with pytest.raises(ConfigError, match=message):
        resolve(torchtitan_config=config, **fields)


@pytest.mark.parametrize("found", ["0.3.0", None])
def test_another_version_is_refused(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(torchtitan, "version", version)
    with pytest.raises(
        ConfigError, match=rf"runs torchtitan 0.2.2, and {found or 'none'} is installed; run pip install"
    ):
        resolve()


MODES = {
    "": "FSDP2",
    "[compile]\nenable = true": "FSDP2, compiled",
    "[parallelism]\ndata_parallel_replicate_degree = 2": "2 replicas",
    "[parallelism]\nenable_async_tensor_parallel = true": "FSDP2, async TP",
}


@pytest.mark.parametrize("content", MODES)
def test_modes(content: str, config: Path) -> None:
    config.write_text(content)
    run = resolve(torchtitan_config=config)
    assert run.spec.mode(run.options) == MODES[content]
    assert run.spec.mode(run.spec.recorded(run.options)) == MODES[content]


def test_shipped_files_are_accepted() -> None:
    assert resolve(torchtitan_config="compile").precision != "fp8"
    assert resolve(torchtitan_config="float8", device="cuda").precision == "fp8"


def test_other_work_has_a_class_of_its_own() -> None:
    source: Any = SimpleNamespace(name="stdlib", sha256="0" * 64)
    assert work_class(resolve(precision="bf16", grad_dtype="bf16"), source).grad_dtype == "fp32"
    fp8 = work_class(resolve(torchtitan_config="float8", device="cuda"), source).fp8
    assert fp8 and fp8.recipe == "tensorwise of torchao without output"


def test_compiled_components_are_told_apart() -> None:
    assert torchtitan.compiles({"compile": {"enable": True}}, "loss")
    assert not torchtitan.compiles({"compile": {"enable": True, "components": ["loss"]}}, "model")
    assert not torchtitan.compiles({"compile": {"enable": True, "backend": "eager"}}, "model")


def test_a_written_file_has_the_settings_that_are_not_replaced() -> None:
    given = {"model": {"name": "llama3", "converters": ["a"]}, "metrics": {"log_freq": 3}}
    given |= {
        "quantize": {"linear": {"float8": {"emulate": True, "filter_fqns": ["output"]}}},
        "compile": {"enable": True},
    }
    kept = torchtitan.without_replaced(given)
    assert kept == {name: part for name, part in given.items() if name != "metrics"} | {"model": {"converters": ["a"]}}
    assert tomllib.loads("\n".join(toml_lines(kept))) == kept
