"""Files that are found by name, in a checkout and in an installed wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megabench import shipped
from megabench.config import ConfigError
from megabench.config.clusters import read_cluster
from megabench.specs.deepspeed_json import read_deepspeed_json

ROOT = Path(__file__).parents[1]


def test_every_shipped_file_is_found_by_its_name():
    for kind in ("studies", "clusters", "deepspeed", "trainer"):
        assert shipped.names(kind) == sorted(path.stem for path in (ROOT / "configs" / kind).iterdir())
        for name in shipped.names(kind):
            assert shipped.find(kind, name).stem == name and shipped.find(kind, name).is_file()


def test_a_path_and_a_file_of_the_user_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shipped.find("studies", "unknown") == Path("unknown")
    assert shipped.find("studies", "folder/quickstart") == Path("folder/quickstart")
    Path("quickstart").mkdir()
    assert shipped.find("studies", "quickstart") == shipped.CONFIGS / "studies" / "quickstart.yaml"
    Path("quickstart").rmdir()
    Path("quickstart").write_text("trials: []")
    assert shipped.find("studies", "quickstart") == Path("quickstart")


def test_clusters_and_deepspeed_files_by_name():
    assert read_cluster("a100-pairs") == read_cluster(str(ROOT / "configs/clusters/a100-pairs.yaml"))
    path = ROOT / "configs/deepspeed/reduce-to-owner.json"
    assert read_deepspeed_json(Path("reduce-to-owner")) == read_deepspeed_json(path)
    with pytest.raises(ConfigError, match="reduce-to-owners"):
        read_deepspeed_json(Path("reduce-to-owners"))


@pytest.mark.e2e
def test_a_wheel_contains_the_commands_and_the_shipped_files(tmp_path):
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*pip, str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    unpacked, empty = tmp_path / "unpacked", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(unpacked)
    empty.mkdir()
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(("tests", "tools", "benchmarks"))]

    def megabench(*arguments: str) -> str:
        command = [sys.executable, "-P", "-m", "megabench", *arguments]
        environment = os.environ | {"PYTHONPATH": str(unpacked)}
        result = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert all(name in megabench("compare", "--list") for name in shipped.names("studies"))
    assert "-m megabench.train --model llama-tiny" in megabench("compare", "quickstart", "--dry-run")
    assert "Best predicted layout: " in megabench("plan", "--cluster", "a100-pairs")
    assert "--zero-stage" in megabench("train", "--help")
    assert "inspect" in megabench("convert", "--help") and "INPUT" in megabench("preprocess", "--help")
    assert not list(empty.iterdir())
