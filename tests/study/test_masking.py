"""Results contain no secrets, and no cell that a spreadsheet evaluates."""

import csv
from pathlib import Path

import pytest
import yaml

from megabench.config import RunConfig
from megabench.runtime.environment import is_secret
from megabench.study.masking import MASKED, without_secrets, without_secrets_in
from megabench.study.study import StudyError, StudyFile, plan_study
from megabench.study.summary import write_csv
from tests.study.records import make_record

SECRETS = [
    "MY_API_TOKEN", "WANDB_KEY", "WANDB_API_KEY", "DATABASE_URL", "DB_URI", "SSH_PASSPHRASE", "GITHUB_PAT",
    "KEY", "SENTRY_DSN", "PGPASSWORD", "DB_PASS", "MYSQL_PWD", "AZURE_STORAGE_CONNECTION_STRING", "SLACK_WEBHOOK",
]  # fmt: skip
PLAIN = ["NCCL_IB_PKEY", "NCCL_P2P_LEVEL", "CUDA_VISIBLE_DEVICES", "KEYBOARD", "OMP_PATH", "BYPASS", "PWD", "HF_HOME"]


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name, "x") and is_secret(name.lower(), "x")


@pytest.mark.parametrize("name", PLAIN)
def test_other_names(name: str) -> None:
    assert not is_secret(name, "https://host:80/a@b")


def test_a_password_in_a_url() -> None:
    assert is_secret("HTTPS_PROXY", "http://me:word@proxy:80")
    command = RunConfig.parse({"model": "llama-tiny"}).command(1, {"HTTPS_PROXY": "http://me:word@proxy:80"})
    assert command.startswith('HTTPS_PROXY="$HTTPS_PROXY" ')


STUDY = """# WANDB_KEY: a comment stays
base:
  model: llama-tiny
  tokenizer: bytes
  env: &common
    WANDB_KEY: &key "hidden # 1"   # of the team
    NCCL_P2P_LEVEL: NVL
    DATABASE_URL: |
      hidden 2
    OTHER: http://me:hidden@host/
trials:
- {name: a, env: {<<: *common, MY_KEY: hidden, B_TOKEN: *key}}
- name: b
  env:
    SSH_PASSPHRASE:
      hidden
      3
"""


def test_a_copy_of_a_study_contains_no_secrets() -> None:
    copy = without_secrets(STUDY)
    assert "hidden" not in copy
    assert "# WANDB_KEY: a comment stays" in copy and "# of the team" in copy
    content, original = yaml.safe_load(copy), yaml.safe_load(STUDY)
    assert content["base"].pop("env") == {
        "WANDB_KEY": MASKED, "NCCL_P2P_LEVEL": "NVL", "DATABASE_URL": MASKED, "OTHER": MASKED,
    }  # fmt: skip
    assert content["base"] == {key: value for key, value in original["base"].items() if key != "env"}
    assert content["trials"][1] == {"name": "b", "env": {"SSH_PASSPHRASE": MASKED}}
    assert without_secrets(copy) == copy


@pytest.mark.parametrize("text", ["", "a", "trials: []\n", "base: {env: }\n", "base: {model: llama-tiny} # é\n"])
def test_a_study_without_secrets_is_copied_exactly(text: str) -> None:
    assert without_secrets(text) == text


def test_a_copy_without_its_secrets_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(without_secrets("base: {model: llama-tiny, env: {WANDB_KEY: abc}}\ntrials: [{name: a}]\n"))
    with pytest.raises(StudyError, match="env WANDB_KEY was removed from this copy"):
        plan_study(StudyFile.read(path), path, 1, "cpu")


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_cell_of_the_summary_is_a_formula(tmp_path: Path, start: str) -> None:
    text = f"{start}cmd|' /C calc'!A0"
    record = make_record([3.0, 2.0], trial=text, model=text, warnings=[text], device=text)
    write_csv(tmp_path / "summary.csv", [record], text)
    (row,) = csv.DictReader((tmp_path / "summary.csv").read_text().splitlines(keepends=True))
    cells = [cell for cell in row.values() if "cmd|" in cell]
    assert cells and not any(cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) for cell in cells)


@pytest.mark.parametrize(
    "token",
    [
        "hf_" + "a1" * 17,
        "AKIA" + "B2" * 8,
        "ghp_" + "c3" * 18,
        "glpat-" + "d4" * 10,
        "sk-proj-" + "e5" * 12,
        "xoxb-1234567890-ab",
    ],
)
def test_an_access_token_is_a_secret_under_any_name(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_secret("NCCL_SETTING", token)
    monkeypatch.setenv("HUB_TOKEN", "sesame-1")
    text = f"base: {{data: {token}, env: {{MODE: sesame-1}}}}  # {token}\nmodels: [a, b-{token}]\n"
    assert without_secrets(text) == 'base: {data: "***", env: {MODE: "***"}}  # ***\nmodels: [a, "***"]\n'
    value = {"error": f"with {token}: sesame-1", "variables": {"A_TOKEN": "x", "B": "task-with-a-long-name-of-its-own"}}
    assert without_secrets_in(value) == {
        "error": "with ***: ***",
        "variables": {"B": "task-with-a-long-name-of-its-own"},
    }
