"""What can be checked of the Dockerfile without Docker. tests/launch/dockerfile_in_chroot.py runs its steps."""

import re
import tomllib
from pathlib import Path

from tests.comparison.compare_process import REPOSITORY
from tests.launch.dockerfile_in_chroot import copy_context, instructions


def test_the_build_context_has_what_pip_needs_and_no_other_work(tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    copy_context(tmp_path / "context")
    names = {str(path.relative_to(tmp_path / "context")) for path in (tmp_path / "context").rglob("*")}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "constraints.txt", project["readme"], *project["license-files"]} <= names
    assert {"megabench/__init__.py", "launch/pretrain.py", "launch/efa.env", "configs/studies/quickstart.yaml"} <= names
    assert not [name for name in names if re.match(r"(\.git|\.venv|tests|benchmarks|runs)(/|$)|.*__pycache__", name)]


def test_every_stage_installs_the_extra_that_exists() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for stage in ("plain", "nvidia"):
        steps = dict(reversed([*instructions(stage)]))  # the first instruction of each name
        name, _, default = steps["ARG"].partition("=")
        assert name == "EXTRAS" and default in extras
        assert any(word == "RUN" and "[${EXTRAS}]" in rest for word, rest in instructions(stage))
