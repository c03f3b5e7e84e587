"""A setting is declared once, and completely."""

from typing import Any

import pytest
from pydantic import Field

from megabench.config import FIELDS, SETTINGS, ConfigError, RunConfig, as_flag, hint
from megabench.settings.setting import Settings, fields_of, meant_by, metadata, names, setting
from megabench.specs.all_settings import engines_with
from megabench.specs.registry import ENGINES, ENGINES_AND_PROGRAMS


@pytest.mark.parametrize("left_out", ["panel", "role", "resume"])
def test_what_records_and_resumed_runs_need_cannot_be_forgotten(left_out: str) -> None:
    about: dict[str, Any] = {"panel": "Run", "role": "option", "resume": "free"}
    setting(1, **about)
    del about[left_out]
    with pytest.raises(TypeError, match=left_out):
        setting(1, **about)


def test_a_plain_field_is_no_setting() -> None:
    class Model(Settings):
        steps: int = Field(1, description="Steps.")

    with pytest.raises(AssertionError, match="steps is declared without"):
        metadata("steps", fields_of(Model)["steps"])


def test_every_field_of_a_run_is_a_setting() -> None:
    own = {name for spec in ENGINES_AND_PROGRAMS.values() for name in spec.settings.model_fields}
    assert {*SETTINGS} == {*RunConfig.model_fields} - {"own"} | own
    assert {"zero_stage", "recompute", "stages"} <= {*names(SETTINGS, role="option")}
    assert names(SETTINGS, searchable=True) == ("micro_batch", "recompute")
    assert names(SETTINGS, resume="same") == ("seq_length", "global_batch", "optimizer", "seed", "data_seed")


@pytest.mark.parametrize("engine", ENGINES_AND_PROGRAMS)
def test_a_run_has_the_settings_of_its_engine_and_no_others(engine: str) -> None:
    own = {name for name in SETTINGS if engine in engines_with(name)}
    assert {*RunConfig.parse({"engine": engine}).options} == own
    assert {*RunConfig.parse({"engine": engine}).flat()} == own | {name for name in SETTINGS if not engines_with(name)}


@pytest.mark.parametrize("name", [name for name in SETTINGS if engines_with(name)])
def test_a_setting_of_another_engine_is_refused_unless_it_is_at_its_default(name: str) -> None:
    engine = next(engine for engine in ENGINES if engine not in engines_with(name))
    default = FIELDS[name].default
    assert RunConfig.parse({"engine": engine, name: default}) == RunConfig.parse({"engine": engine})
    other = next(value for value in (True, False, 1, "even", "all") if value != default)
    with pytest.raises(ConfigError, match=f"{name} is a setting of the {engines_with(name)[0]}"):
        RunConfig.parse({"engine": engine, name: other})


def test_nobody_gives_the_inner_structure() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'own'"):
        RunConfig.parse({"own": {"zero_stage": 1}})


def test_synonyms_mean_one_setting_each() -> None:
    synonyms = [word for about in SETTINGS.values() for word in about.synonyms]
    assert len(synonyms) == len({*synonyms}) and not {*synonyms} & {*SETTINGS}
    assert all(word == word.lower().replace("-", "_") for word in synonyms), "as meant_by compares them"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--tensor-parallel-size", "tp"),
        ("train_batch_size", "global_batch"),
        ("--learning-rate", "lr"),
        ("Num-Hidden-Layers", "num_layers"),
    ],
)
def test_names_of_other_programs(word: str, meant: str) -> None:
    assert meant_by(word, SETTINGS) == meant
    assert hint(word, SETTINGS).startswith(f"here it is {meant}: ")


def test_names_that_are_nearly_right() -> None:
    assert hint("zero_stag", SETTINGS) == "did you mean zero_stage?"
    assert hint("--stepz", SETTINGS, as_flag, "see --help").startswith("did you mean --steps")
    assert hint("qqqq", SETTINGS, otherwise="see --help") == "see --help"
    assert hint("output_dir", ["steps"], otherwise="no") == "no", "a trial cannot say where it saves"
