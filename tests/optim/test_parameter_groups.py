"""Parameter groups: how the setting is read, what applies, and what is refused."""

from typing import Any

import pytest

from megabench.config import ConfigError, ResolvedConfig, RunConfig
from megabench.optim.parameter_groups import HyperParameters


def resolve(param_groups: str, **fields: Any) -> ResolvedConfig:
    given = {"model": "llama-tiny", "engine": "ddp", "param_groups": param_groups, **fields}
    return RunConfig.parse(given).resolve(1, "cpu")


def test_the_first_group_that_sets_a_value_applies() -> None:
    run = resolve(r"layers\.0\.: lr_scale=0.5; norm: lr_scale=3 weight_decay=0.2 beta2=0.99")
    assert run.hyper_parameters("model.layers.0.input_layernorm.weight", 1) == HyperParameters(0.2, (0.9, 0.99), 0.5)
    assert run.hyper_parameters("model.layers.1.input_layernorm.weight", 1) == HyperParameters(0.2, (0.9, 0.99), 3.0)
    assert run.hyper_parameters("model.layers.1.mlp.up_proj.weight", 2) == HyperParameters(0.1, (0.9, 0.95), 1.0)


@pytest.mark.parametrize(
    ("param_groups", "fields", "said"),
    [
        ("norm", {}, "'norm' is not a parameter group; give a pattern of parameter names and the"),
        ("norm:", {}, "is not a parameter group"),
        ("(: lr_scale=1", {}, "'(' is not a regular expression"),
        ("norm: lr=1", {}, "'lr=1' is not a value of a group; use each of lr_scale, weight_decay, beta1, beta2 once"),
        ("norm: lr_scale=1 lr_scale=2", {}, "'lr_scale=2' is not a value of a group"),
        ("norm: lr_scale=fast", {}, "'lr_scale=fast' is not allowed; lr_scale must be a number between 0 and 1000"),
        ("norm: weight_decay=-1", {}, "weight_decay must be a number between 0 and 100"),
        ("norm: beta2=1", {}, "beta2 must be a number above 0 and below 1"),
        (
            "expert: lr_scale=1",
            {},
            "no parameter of llama-tiny matches 'expert'; use a pattern of names such as",
        ),
        ("norm: beta1=0.5", {"optimizer": "sgd"}, "sgd has no betas for model."),
        ("q_proj: beta1=0.5", {"optimizer": "muon"}, "muon has no betas for model.layers.0.self_attn.q_proj.weight"),
        ("q_proj: lr_scale=2", {"engine": "megatron"}, "which are one parameter of the megatron engine; use a pattern"),
    ],
)
def test_what_is_refused_and_why(param_groups: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(param_groups, **fields)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_equal_groups_are_equal_work() -> None:
    same = ("norm:lr_scale=2", "norm: lr_scale=2.0;", " norm : lr_scale=2e0 ; ")
    assert {resolve(text).param_groups for text in same} == {"norm: lr_scale=2"}
    assert resolve("").param_groups is None
    swapped = ("norm: weight_decay=0 lr_scale=2", "norm: lr_scale=2 weight_decay=0")
    assert len({resolve(text).param_groups for text in swapped}) == 1


def test_no_digit_of_a_value_is_lost() -> None:
    run = resolve("norm: lr_scale=1.23456789012 weight_decay=1e-9")
    assert run.hyper_parameters("model.norm.weight", 1) == HyperParameters(1e-9, (0.9, 0.95), 1.23456789012)


def test_tensors_of_one_parameter_may_have_the_same_values() -> None:
    assert resolve("[qkv]_proj: lr_scale=2", engine="megatron").param_groups
    assert resolve("embed: beta1=0.5", optimizer="muon").param_groups
