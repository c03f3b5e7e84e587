"""The callbacks of docs/callbacks.md, used as the page says."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from megabench.config import ConfigError
from megabench.record import RunRecord
from megabench.train.callbacks import Callback
from megabench.train.callbacks.user_callbacks import load_callbacks

ROOT = Path(__file__).parents[3]
CODE, VALIDATION = re.findall(r"```python[^\n]*\n(.*?)```", (ROOT / "docs" / "callbacks.md").read_text(), re.DOTALL)


def pretrain(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A run on two ranks whose working directory is `folder`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(ROOT / "launch" / "pretrain.py"), "--model", "llama-tiny", "--num-layers", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "--data", "synthetic", "--device", "cpu", *flags],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.e2e
def test_the_page_s_callback_adds_its_section_to_the_record(tmp_path: Path) -> None:
    (tmp_path / "my_callbacks.py").write_text(CODE)
    # a learning rate at which the loss jumps
    flags = ["--steps", "8", "--warmup-steps", "2", "--optimizer", "sgd", "--lr", "300", "--lr-warmup", "0"]
    done = pretrain(tmp_path, *flags, "--out", "run", "--callbacks", "my_callbacks:LossSpikes")
    assert done.returncode == 0, done.stdout + done.stderr
    record = RunRecord.read(tmp_path / "run" / "record.json")
    pairs = enumerate(pairwise(record.losses), 2)
    spikes = [step for step, (before, after) in pairs if before and after and after > 1.1 * before]
    assert spikes, record.losses
    assert record.extra == {"LossSpikes": {"steps": spikes}}
    assert done.stdout.count("the loss rose from") == len(spikes), "the note comes from rank 0 alone"


@pytest.mark.e2e
@pytest.mark.parametrize("step", [5, 12])
def test_a_run_whose_directory_was_deleted_ends_with_one_sentence(tmp_path: Path, step: int) -> None:
    """The run has 12 steps, and looks for its directory after step 10 and at the end."""
    (tmp_path / "faults.py").write_text(
        "import shutil, sys\n"
        "from megabench.train.callbacks import Callback\n"
        "class Deletes(Callback):\n"
        "    def on_step_end(self, step):\n"
        f"        if step.number == {step}: shutil.rmtree('run', ignore_errors=True)\n"
        # one write a line, so that the lines of two ranks do not mix
        "    def on_error(self, reason): sys.stdout.write(f'on_error {reason}\\n')\n"
        "    def close(self): sys.stdout.write('closed\\n')\n"
    )
    done = pretrain(tmp_path, "--steps", "12", "--out", "run", "--callbacks", "faults:Deletes")
    output = done.stdout + done.stderr.partition("torch/distributed")[0]  # before torchrun's own lines
    assert done.returncode == 1 and "Traceback" not in output, output
    (reason,) = re.findall(r"^Error: (.*)$", output, re.MULTILINE)
    assert "deleted or unmounted during the run" in reason
    lines = re.findall(r"^(?:on_error|closed).*", output, re.MULTILINE)
    assert sorted(lines) == ["closed"] * 2 + [f"on_error {reason}"] * 2, "each rank knows the reason"


@pytest.mark.e2e
def test_metrics_of_a_callback_reach_the_log_tensorboard_and_the_record(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "validation.py").write_text(VALIDATION)
    callback = "validation:ValidationLoss(data=stdlib, every=2, num_batches=2)"
    done = pretrain(tmp_path, "--tp", "2", "--steps", "4", "--log-every", "1", "--out", "run", "--callbacks", callback)
    assert done.returncode == 0, done.stdout + done.stderr
    record = RunRecord.read(tmp_path / "run" / "record.json")
    first, second, third, fourth = record.metrics["validation/loss"]
    assert first is None and third is None and second is not None and fourth is not None
    printed = re.findall(r"^step (\d)/4 .*validation/loss (\S+)  ", done.stdout, re.MULTILINE)
    assert printed == [("2", f"{second:.4g}"), ("4", f"{fourth:.4g}")]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    written = [(event.step, event.value) for event in events.Scalars("validation/loss")]
    assert written == [(2, pytest.approx(second)), (4, pytest.approx(fourth))]


@pytest.mark.e2e
def test_a_name_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    done = pretrain(tmp_path, "--steps", "1", "--callbacks", "nowhere:Spikes")
    (sentence,) = re.findall(r"^Error: (.*)$", done.stdout + done.stderr, re.MULTILINE)
    assert sentence.startswith("callbacks=nowhere:Spikes: No module named 'nowhere'") and "PYTHONPATH" in sentence


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ("LossSpikes", "use module:Class"),
        ("json:nothing", "has no attribute 'nothing'"),
        ("json:JSONDecoder", "is not a subclass of megabench.train.callbacks.Callback"),
        ("own_callbacks:LossSpikes,own_callbacks:LossSpikes", "two classes named LossSpikes"),
        ("own_callbacks:LossSpikes(factor)", "use arguments as name=value"),
        ("own_callbacks:LossSpikes(factor=1", "use module:Class or module:Class(name=value)"),
        ("own_callbacks:LossSpikes(limit=1)", "unexpected keyword argument 'limit'; correct its arguments"),
        ("leaving_callbacks:LossSpikes", "cannot be imported: SystemExit: 0; correct the module"),
        ("own_callbacks:LossSpikes(factor=@file)", "put @file in quotes"),
        ("own_callbacks:LossSpikes(factor=[1])", "put [1] in quotes"),
        ("broken_callbacks:LossSpikes", "cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_names_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, sentence: str) -> None:
    (tmp_path / "own_callbacks.py").write_text(CODE)
    (tmp_path / "leaving_callbacks.py").write_text("import sys\n\nsys.exit(0)\n")
    (tmp_path / "broken_callbacks.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_callbacks(names, [])


def test_several_callbacks_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two_callbacks.py").write_text(f"{CODE}\n\nclass Second(LossSpikes):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    callbacks: list[Callback] = []
    load_callbacks("two_callbacks:LossSpikes(factor=1.5), two_callbacks:Second( factor = 'a, b' )", callbacks)
    assert [type(callback).__name__ for callback in callbacks] == ["LossSpikes", "Second"]
    assert all(isinstance(callback, Callback) for callback in callbacks)
    assert [vars(callback)["factor"] for callback in callbacks] == [1.5, "a, b"]
