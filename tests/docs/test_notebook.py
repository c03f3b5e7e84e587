"""docs/study-to-verdict.ipynb runs, and still prints what it shows."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "study-to-verdict.ipynb"


@pytest.mark.e2e
def test_the_notebook_runs_and_reaches_the_verdict_that_it_shows(tmp_path: Path) -> None:
    shown = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(run, timeout=240, resources=resources).execute()
    assert verdict(run) == verdict(shown) and verdict(run).startswith("'Yes: all 3 trials reach the same losses")
    assert outputs(run, "Layout(tp=8") == outputs(shown, "Layout(tp=8")
    assert outputs(run, "best = predicted.best") == outputs(shown, "best = predicted.best")
    assert (tmp_path / "runs" / "layouts" / "report.html").is_file()


def verdict(notebook: nbformat.NotebookNode) -> str:
    """The answer of the study, without the size of the difference, which depends on the machine."""
    (text,) = outputs(notebook, "results.answer.headline")
    return text.partition(" (relative")[0]


def outputs(notebook: nbformat.NotebookNode, start: str) -> list[str]:
    """What the cell that contains `start` printed or returned."""
    (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and start in cell.source)
    return [output.get("text") or output["data"]["text/plain"] for output in cell.outputs]
