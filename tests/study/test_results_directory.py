"""The command that confirms a ranking: it is shown only if it would continue the study."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from megabench.record import RunRecord, write_records
from megabench.study.compare_request import Request
from megabench.study.results_directory import read_folder
from tests.study.records import make_record

FILE = (
    "base: {model: llama-tiny, device: cpu, world_size: 2}\ntrials: [{name: a, tp: 2}, {name: b}, {name: c, seed: 2}]\n"
)


def folder_of(path: Path, names: str = "abc", file: str = FILE, **fields: Any) -> Path:
    """An output directory with a record of each of the named trials."""
    path.mkdir()
    (path / "study.yaml").write_text(file)
    study, _ = Request(path / "study.yaml", path).plan_here(2)
    ids = {trial.name: trial.id for trial in study.trials}
    records: list[RunRecord] = [
        make_record([6.0], 1000 + number, **{"trial": name, "trial_id": ids[name], "world_size": 2} | fields)
        for number, name in enumerate(names)
    ]
    write_records(path / "results.jsonl", records)
    return path


def test_the_command_continues_the_study(tmp_path):
    folder = folder_of(tmp_path / "the results")
    said = read_folder(folder).confirm
    words = shlex.split(said.removeprefix("To confirm the ranking: "))
    assert words == [
        *("megabench", "compare", f"{folder}/study.yaml", "--out", str(folder), "--nproc", "2"),
        *("--resume", "--confirm"),
    ]


def test_trials_that_did_not_run_are_not_selected(tmp_path):
    assert "--nproc 2 --only a --only c --resume" in read_folder(folder_of(tmp_path / "out", "ac")).confirm


@pytest.mark.parametrize("fields", [{"trial_id": "of another release"}, {"trial_id": None}])
def test_records_that_the_command_would_put_aside_have_none(tmp_path, fields):
    assert read_folder(folder_of(tmp_path / "out", **fields)).confirm is None


def test_a_study_that_cannot_run_again_has_none(tmp_path):
    folder = folder_of(tmp_path / "out")
    for text in (FILE.replace("tp: 2", "tp: 3"), FILE.replace("name: c", "name: c, env: {TOKEN: '***'}")):
        (folder / "study.yaml").write_text(text)
        assert read_folder(folder).confirm is None
    (folder / "study.yaml").unlink()
    assert read_folder(folder).confirm is None


def test_several_hosts_are_started_by_their_launcher(tmp_path):
    said = read_folder(folder_of(tmp_path / "out", num_hosts=2)).confirm
    assert said == "To confirm the ranking, start the study again on all hosts with --resume --confirm."
    emulated = read_folder(folder_of(tmp_path / "emulated", num_hosts=2, emulated_hosts=2)).confirm
    assert emulated.endswith("--resume --confirm") and "megabench compare" in emulated


def test_large_studies_are_not_checked_at_each_report(tmp_path):
    many = FILE.replace("seed: 2", f"seed: {list(range(2, 210))}")
    folder = folder_of(tmp_path / "out")
    (folder / "study.yaml").write_text(many)
    assert read_folder(folder).confirm is None
