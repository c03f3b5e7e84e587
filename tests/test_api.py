"""The Python interface: what a script or a notebook imports from megabench."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import megabench
from megabench import Layout, compare, load, plan
from megabench.errors import UserError

ROOT = Path(__file__).parents[1]
NETWORK = ROOT / "benchmarks" / "measured-network" / "network.json"
STUDY = """
base:
  {model: llama-tiny, num_layers: 2, device: cpu, world_size: 2, seq_length: 32, global_batch: 4, micro_batch: 1,
   steps: 5, warmup_steps: 1}
trials:
  - {name: zero3, engine: deepspeed, zero_stage: 3}
  - {name: tp2, tp: 2}
"""


def test_names_are_those_of_the_interface():
    assert Layout(tp=8, pp=2).with_world_size(32).dp == 2
    with pytest.raises(AttributeError, match="has no attribute 'comparison_of'"):
        megabench.comparison_of  # noqa: B018


def test_planning_loads_no_torch():
    code = "import sys; from megabench import load, plan; plan('llama3-8b', 'p5.48xlarge:1'); "
    code += "load('benchmarks/llama3-8b-nvlink').answer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_plan_has_a_best_layout_and_its_command():
    found = plan("llama3-8b", "p5.48xlarge:1", global_batch=64)
    assert found.best in found.ranked and found.best.candidate.layout.world_size == 8
    assert found.command.startswith("torchrun --nproc-per-node 8 -m megabench.train ") and found.command in str(found)
    assert plan("llama3-8b", "a100-pairs").prediction.topology.world_size == 16


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plan("llama3-8b", "p7.48xlarge"), "instance type 'p7.48xlarge' is not known"),
        (lambda: plan("llama3-405b", "p4d.24xlarge:1"), "llama3-405b"),
        (lambda: load("nowhere"), "nowhere contains no results.jsonl"),
        (lambda: plan("llama3-8b", "p5.48xlarge:1", seq_length=-1), "seq_length=-1 must be a positive number"),
        (lambda: plan("llama3-8b", "p5.48xlarge:1", top=0), "top=0 must be a positive number"),
        (lambda: plan("llama3-8b", "p5.48xlarge:1", fabric=NETWORK), "the cluster has one host"),
        (lambda: compare("quickstrat"), "did you mean quickstart"),
        (lambda: compare("quickstart", "unused", num_processes=-1), "-1 processes cannot run a study"),
        (lambda: compare("quickstart", "unused", only="nothing*"), r"--only nothing\* matches no trial"),
        (lambda: compare("quickstart", "unused", settings={"data": Path("x")}), "data=x does not exist"),
        (lambda: compare("quickstart", "unused", settings={"tp4.lr": [1e-3, 1e-4]}), "has several values"),
        (lambda: compare("quickstart", "unused", settings={"tp9.pp": 2}), "--set tp9 matches no trial"),
    ],
)
def test_invalid_input_is_a_user_error(call, words):
    with pytest.raises(UserError, match=words):
        call()
    assert not Path("unused").exists()


def test_saved_results_have_an_answer_rows_and_findings():
    results = load(ROOT / "benchmarks" / "llama3-8b-nvlink")
    assert results.answer.headline.startswith("dp trains fastest: 10,875 tokens/s per GPU")
    assert results.trials[0].trial == "dp" and results.answer.headline in str(results)
    assert len(results.records) >= len(results.trials) and results.findings


@pytest.mark.e2e
def test_compare_returns_what_it_measured_and_keeps_signal_handlers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("pairs.yaml").write_text(STUDY)
    before = signal.getsignal(signal.SIGINT)
    results = compare("pairs.yaml", settings={"steps": 4, "tp2.micro_batch": 2})
    assert signal.getsignal(signal.SIGINT) is before
    assert results.folder == Path("runs/pairs") and "records: runs/pairs/results.jsonl" in capsys.readouterr().out
    assert {row.trial: row.parity for row in results.trials} == {"zero3": "equal", "tp2": "equal"}
    assert {run.trial: (run.num_steps, run.micro_batch) for run in results.records} == {"zero3": (4, 1), "tp2": (4, 2)}
