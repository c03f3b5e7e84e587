"""A setting is declared once, and completely."""

from typing import Any

import pytest
from pydantic import BaseModel, Field

from megabench.config import SETTINGS, RunConfig, hint
from megabench.settings.field import meant_by, names, setting, settings_of


@pytest.mark.parametrize("left_out", ["panel", "role", "resume"])
def test_what_records_and_resumed_runs_need_cannot_be_forgotten(left_out: str) -> None:
    about: dict[str, Any] = {"panel": "Run", "role": "option", "resume": "free"}
    setting(1, "Something.", **about)
    del about[left_out]
    with pytest.raises(TypeError, match=left_out):
        setting(1, "Something.", **about)


def test_a_plain_field_is_no_setting() -> None:
    class Model(BaseModel):
        steps: int = Field(1, description="Steps.")

    with pytest.raises(AssertionError, match="steps is declared without"):
        settings_of(Model)


def test_every_field_of_a_run_is_a_setting() -> None:
    assert [*SETTINGS] == [*RunConfig.model_fields]
    assert {"zero_stage", "recompute", "powersgd_rank"} <= {*names(SETTINGS, role="option")}
    assert names(SETTINGS, searchable=True) == ("micro_batch", "recompute")
    assert names(SETTINGS, resume="same") == ("seq_length", "global_batch", "optimizer", "seed")


def test_synonyms_mean_one_setting_each() -> None:
    synonyms = [word for about in SETTINGS.values() for word in about.synonyms]
    assert len(synonyms) == len({*synonyms}) and not {*synonyms} & {*SETTINGS}
    assert all(word == word.lower().replace("-", "_") for word in synonyms), "as meant_by compares them"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--tensor-parallel-size", "tp"),
        ("batch_size", "global_batch"),
        ("--learning-rate", "lr"),
        ("gradient_accumulation_steps", "global_batch"),
        ("Gradient-Checkpointing", "recompute"),
    ],
)
def test_names_of_other_programs(word: str, meant: str) -> None:
    assert meant_by(word, SETTINGS) == meant
    assert hint(word, SETTINGS).startswith(f"here it is {meant}: ")


def test_names_that_are_nearly_right() -> None:
    assert hint("zero_stag", SETTINGS) == "did you mean zero_stage?"
    assert hint("--stepz", SETTINGS, lambda name: f"--{name}", "see --help").startswith("did you mean --steps")
    assert hint("qqqq", SETTINGS, otherwise="see --help") == "see --help"
    assert hint("output_dir", ["steps"], otherwise="no") == "no", "a trial cannot say where it saves"
