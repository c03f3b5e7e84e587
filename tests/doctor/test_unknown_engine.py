"""Records of an engine that this version does not know are still drawn, examined and summed up."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megabench.cost.profile import shipped_profiles
from megabench.doctor import examine
from megabench.planner.predict import Predictor
from megabench.record import read_records, write_records
from megabench.report import render
from megabench.study.results_directory import read_folder
from megabench.study.table import show
from tests.planner.jobs import hosts


@pytest.mark.parametrize("name", ["engines-4-gpus", "llama3-8b-two-hosts", "gpt2-zero"])
def test_reports_tables_and_findings(tmp_path: Path, measured: dict[str, Path], name: str) -> None:
    records = read_records(measured[name] / "results.jsonl")
    renamed = [record.model_copy(update={"engine": f"new-{record.engine}"}) for record in records]
    write_records(tmp_path / "results.jsonl", renamed)
    (tmp_path / "study.yaml").write_text((measured[name] / "study.yaml").read_text())
    study = read_folder(tmp_path)
    findings = examine(study.records, study.reference)
    page = render(study, findings)
    assert "new-" in page and all(record.trial in page for record in records)
    terminal = Console(file=StringIO(), width=200)
    show(terminal, study.records, study.reference)
    assert isinstance(terminal.file, StringIO)
    assert all(record.trial in terminal.file.getvalue() for record in records)


def test_nothing_is_predicted_of_them(measured: dict[str, Path]) -> None:
    record = read_records(measured["engines-4-gpus"] / "results.jsonl")[0]
    topology = hosts(1, record.world_size)
    predictor = Predictor(topology, shipped_profiles()["h200"], [])
    assert predictor.predict(record) is not None
    assert predictor.predict(record.model_copy(update={"engine": "new"})) is None
