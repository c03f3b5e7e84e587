"""The command line is RunConfig: every field has a flag with help, and a file's fields can be overridden."""

import re
from pathlib import Path
from typing import Any

import pytest

from megabench.config import FIELDS, ConfigError, RunConfig
from megabench.train.flags import parse_flags


def test_flags_become_fields() -> None:
    run = parse_flags(
        ["--model", "llama-tiny", "--tp", "2", "--betas", "0.8", "0.9", "--engine", "deepspeed", "--zero-stage", "1"]
    )
    assert run == RunConfig.parse(
        {"model": "llama-tiny", "tp": 2, "betas": (0.8, 0.9), "engine": "deepspeed", "zero_stage": 1}
    )
    assert {*run.given()} == {"model", "tp", "betas", "engine", "zero_stage"}


@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 2, "pp": 2, "betas": (0.8, 0.9), "lr": 1e-3, "eps": 1e-6, "data": "synthetic", "num_layers": 4},
        {"engine": "fsdp", "reshard_after_forward": False, "compile": True, "micro_batch": "auto"},
    ],
)
def test_a_configuration_survives_its_own_flags(fields: dict[str, Any]) -> None:
    run = RunConfig(model="llama-tiny", **fields)
    assert parse_flags(run.flags()) == run


def test_a_micro_batch_is_a_number_or_auto() -> None:
    assert [parse_flags(["--micro-batch", word]).micro_batch for word in ("4", "auto")] == [4, "auto"]


def test_every_field_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_flags(["--help"]) is None
    text = capsys.readouterr().out
    for name, field in FIELDS.items():
        assert re.search(f"--{name.replace('_', '-')}[ /]", text)
        assert field.description, name


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: llama-tiny\ntp: 2\nbetas: [0.7, 0.8]\n")
    run = parse_flags(["--config", str(path), "--tp", "4"])
    assert run == RunConfig.parse({"model": "llama-tiny", "tp": 4, "betas": (0.7, 0.8)})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tpp", "2"], ["--tpp", "--tp"]),
        (["--precision", "bf17"], ["bf17", "bf16", "fp16", "fp32", "fp8"]),
        (["--tp", "two"], ["--tp", "integer"]),
        (["--micro-batch", "some"], ["micro_batch='some'", "integer"]),
    ],
)
def test_unknown_flags_and_values(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_flags(arguments)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("tpp: 2", "unknown setting 'tpp'; did you mean tp or pp?"),
        ("precision: bf17", "precision='bf17' is not known; use one of bf16, fp16, fp8, fp32"),
        ("tp: 0", "tp=0 is not valid"),
        ("steps: 10000000000", "steps=10000000000 is not valid: input should be less than or equal to 1000000000"),
        ("tp: true", "tp=True is not valid: expected a number or a string, got a boolean"),
        ("- tp", "must contain a mapping"),
        ("tp: [", "is not valid YAML"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        parse_flags(["--config", str(path)])
    assert sentence in str(error.value)
    assert str(path) in str(error.value)


def test_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.yaml"):
        parse_flags(["--config", "nowhere.yaml"])
