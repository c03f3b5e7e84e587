"""The command line: instant to start, and clear about what cannot be run."""

import os
import subprocess
import sys

import pytest

from tests.comparison.compare_process import REAL, REPOSITORY, compare


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.parametrize(
    "module",
    [
        "megabench.cli",
        "megabench.cli.train",
        "tools.planner_validation.__main__",
    ],
)
def test_planning_loads_no_torch(module):
    assert loads_no_torch(module)


@pytest.mark.parametrize(
    "package",
    ["record", "metrics", "parallel", "settings", "cost", "specs", "config", "planner", "study", "doctor", "report"],
)
def test_packages_for_planning_and_reports_load_no_torch(package):
    folder = REPOSITORY / "megabench" / package
    files = sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    modules = [".".join(file.relative_to(REPOSITORY).with_suffix("").parts) for file in files]
    assert modules and loads_no_torch(*modules)


def loads_no_torch(*modules: str) -> bool:
    return python("-c", f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)").returncode == 0


def test_what_loads_torch_is_seen():
    assert not loads_no_torch("megabench.record", "megabench.engines.base")


def test_help_is_instant():
    def seconds() -> float:
        """CPU time: one process on an idle machine takes as long; what else runs beside the tests does not count."""
        before = os.times()
        assert "compare" in python("-m", "megabench", "--help").stdout
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(5)) < 0.5


def test_help_tells_the_exit_statuses():
    text = " ".join(python("-m", "megabench", "compare", "--help").stdout.split())
    assert "2 if the study cannot be run" in text and "--resume" in text


@pytest.mark.parametrize(
    ("study", "arguments", "words"),
    [
        ("trials: [{tp: 3}]", [], "trial 1 (tp=3): tp=3 × cp=1"),
        ("trials: [{tp: 2}]", ["--nproc", "3"], "needs 4 processes but the launch has 3"),
        ("trials: [{tp: 2}]", ["--only", "tp3"], "--only tp3 matches no trial"),
        ("trials: [{tp: 2}]", ["--out", "/dev/null/out"], "--out /dev/null/out cannot be created"),
        ("trials: [", [], "is not valid YAML"),
    ],
)
def test_a_study_that_cannot_run_is_one_sentence_and_2(tmp_path, study, arguments, words):
    path, out = tmp_path / "study.yaml", tmp_path / "out"
    path.write_text(f"base: {{model: llama-tiny, world_size: 4, device: cpu}}\n{study}")
    status, stdout, stderr = compare(path, "--out", out, *arguments, command=REAL)
    assert (status, stdout) == (2, "")
    assert stderr.startswith("Error: ") and words in stderr and stderr.count("\n") == 1
    assert not out.exists()


def test_wrong_usage_is_2(tmp_path):
    status, _, stderr = compare("quickstart", "--nprocs", 2, command=REAL)
    assert status == 2 and "--nproc" in stderr


def test_make_quickstart_keeps_earlier_results(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("python", "megabench"):
        (tmp_path / "bin" / name).symlink_to("/bin/echo")
    (tmp_path / ".installed").touch()

    def quickstart(out):
        words = ["make", "--silent", "quickstart", f"VENV={tmp_path}", f"OUT={out}"]
        done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines()[-1]

    assert quickstart(tmp_path / "new") == (0, f"compare quickstart --out {tmp_path}/new")
    words = f"{tmp_path}/bin already exists. Use another directory: make quickstart OUT=runs/NAME"
    assert quickstart(tmp_path / "bin") == (2, words)
    assert (tmp_path / "bin" / "megabench").exists()


def test_nproc_is_not_for_launchers():
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
    status, _, stderr = compare("s.yaml", "--out", "o", "--nproc", 2, command=REAL, **launcher)
    assert status == 2 and "--nproc-per-node" in stderr
    status, _, stderr = compare("s.yaml", "--out", "o", "--nproc", 2, command=REAL, **launcher | {"RANK": "1"})
    assert (status, stderr) == (2, "")
    status, _, stderr = compare("s.yaml", "--nprocs", 2, command=REAL, **launcher | {"RANK": "1"})
    assert (status, stderr) == (2, "")


def test_a_dry_run_prints_what_would_run_and_leaves_nothing(tmp_path):
    study, out = tmp_path / "study.yaml", tmp_path / "out"
    study.write_text(
        "base: {model: llama-tiny, device: cpu}\n"
        "trials:\n"
        "  - {name: dp, repeats: 2, timeout_seconds: 90}\n"
        "  - {name: tp, tp: 2, env: {A: b c}}\n"
        "  - {name: zero3, engine: deepspeed}\n"
    )
    arguments = ["--out", str(out), "--nproc", "2", "--dry-run", "--only", "[dt]p"]
    result = python("-m", "megabench", "compare", str(study), *arguments)
    assert result.returncode == 0, result.stderr
    head, dp, tp = result.stdout.splitlines()
    assert head == "study: 3 runs, against zero3"
    assert dp.startswith("dp (2 × 90 s at most): torchrun --nproc-per-node 2 -m megabench.train --model llama-tiny")
    assert tp.startswith("tp (1800 s at most): A='b c' torchrun --nproc-per-node 2 ") and " --tp 2" in tp
    assert not out.exists()
