"""`megabench compare` finds an error in a gradient that losses and gradient norms hide, and names its place."""

import subprocess
import sys
from pathlib import Path

import pytest

from megabench.record import read_records
from tests.comparison.compare_process import REPOSITORY

STUDY = """
base: {model: llama-tiny, num_layers: 2, device: cpu, seq_length: 64, steps: 4, warmup_steps: 3, world_size: 2}
trials:
  - {name: zero3, engine: deepspeed, global_batch: 8, micro_batch: 2}
  - {name: tp2, tp: 2, global_batch: 8, micro_batch: 2}
  - {name: wrong, engine: ddp, global_batch: 8, micro_batch: 2, callbacks: "planted:Planted"}
"""
PLANTED = """
from megabench.train.callbacks import Callback


class Planted(Callback):
    def on_ready(self, trainer):
        self.engine = trainer.engine

    def before_update(self, step):
        for name, parameter in self.engine.model.named_parameters():
            if name == "model.layers.1.mlp.up_proj.weight":
                parameter.grad[:8] *= 1.02
"""


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_a_wrong_gradient_is_placed(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(STUDY)
    (tmp_path / "planted.py").write_text(PLANTED)
    command = [sys.executable, "-m", "megabench", "compare", "study.yaml", "--nproc", "2", "--out", "out"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{REPOSITORY}:{tmp_path}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = {record.trial: record for record in read_records(tmp_path / "out" / "results.jsonl")}
    assert done.returncode == 1, done.stdout + done.stderr
    assert {name: record.status for name, record in found.items()} == {"zero3": "ok", "tp2": "ok", "wrong": "diverged"}
    parity = found["wrong"].parity
    assert parity and (parity.max_relative_difference or 0) < parity.tolerance, "the losses hide the error"
    assert found["wrong"].error and "the first is model.layers.1.mlp.up_proj.weight" in found["wrong"].error
    assert found["wrong"].error in done.stdout
    tensors = found["tp2"].parity and found["tp2"].parity.tensors
    assert tensors and tensors.problems == [] and tensors.num_tensors == 21
    sketches = found["tp2"].sketches
    assert sketches and sketches.num_bytes == (tmp_path / "out/logs/tp2/sketches.safetensors").stat().st_size
