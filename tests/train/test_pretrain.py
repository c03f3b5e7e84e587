"""launch/pretrain.py as a user starts it."""

import functools
import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megabench.record import KernelTraits, RunRecord

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
TINY = ["--model", "llama-tiny", "--seq-length", "64", "--device", "cpu"]


def pretrain(*flags: str, processes: int | None = None) -> subprocess.CompletedProcess[str]:
    """Runs launch/pretrain.py, under torchrun where `processes` are given, with stderr in stdout."""
    start = [sys.executable]
    if processes:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*start, "launch/pretrain.py", *TINY, *flags]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False
    )


def test_a_model_that_cannot_fit_is_refused() -> None:
    result = pretrain("--model", "llama3-8b", "--num-layers", "10000")
    assert result.returncode == 2 and result.stdout.startswith("Error: llama3-8b needs about 3"), result.stdout
    assert "a --model that fits without --num-layers (llama-tiny, " in result.stdout
    assert "Traceback" not in result.stdout
    assert result.stdout.rstrip().endswith("python launch/pretrain.py --model llama-tiny --steps 20")


def test_too_few_processes_are_refused_with_the_command_to_type() -> None:
    result = pretrain("--tp", "2", "--pp", "8", processes=2)
    message, _, after = result.stdout.partition("torch/distributed")  # torchrun's own lines come after the message
    assert "needs a multiple of 16 processes, but the world size is 2" in message and after, result.stdout
    assert f"torchrun --nproc-per-node 16 launch/pretrain.py {' '.join(TINY)} --tp 2 --pp 8\n" in message
    assert "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 launch/" in message


def test_a_run_and_what_it_leaves(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = pretrain(
        "--tp", "2", "--pp", "2", "--steps", "8", "--log-every", "1", "--out", str(tmp_path / "run"), processes=4
    )
    assert result.returncode == 0, result.stdout
    record = RunRecord.read(tmp_path / "run" / "record.json")
    printed = re.findall(r"^step +\d+/8 .*loss (\S+)  grad (\S+)  ", result.stdout, re.MULTILINE)
    assert printed == [
        (f"{loss:.4f}", f"{norm:.3f}") for loss, norm in zip(record.losses, record.grad_norms, strict=True)
    ]
    assert "Warning" not in result.stdout.split("llama-tiny", 1)[1]

    assert record.layout.model_dump() == {"tp": 2, "cp": 1, "pp": 2, "vp": 1, "dp": 1}
    assert record.losses[0] == pytest.approx(math.log(512), abs=0.2)
    assert record.step_seconds is not None and len(record.step_seconds.all) == 3
    assert record.device == "cpu" and record.mfu is None and record.peak_tflops is None
    assert record.tokens_per_second == pytest.approx(16 * 64 / record.step_seconds.median)
    assert {(group.kind, tuple(group.ranks)) for group in record.groups} == {
        ("tp", (0, 1)), ("tp", (2, 3)), ("pp", (0, 2)), ("pp", (1, 3)),
    }  # fmt: skip
    assert record.kernel_traits == KernelTraits(
        flash_attention=True,
        fused_norm=True,
        fused_activation=False,
        fused_loss=True,
        fuses_weight_gradient=True,
        adds_output_gradient=True,
    )
    assert record.failure is None and (record.auto_settings, record.requested_kernels) == ([], "auto")
    assert record.command.endswith(f"--out {tmp_path / 'run'}") and "--tp 2 --pp 2" in record.command

    scalars = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [round(event.value, 4) for event in scalars.Scalars("train/loss")] == [round(x, 4) for x in record.losses]
    throughput = scalars.Scalars("throughput/tokens_per_second")
    assert [event.step for event in throughput] == [6, 7, 8], "warm-up steps are in no figure"


def test_shorter_than_its_warm_up(tmp_path: Path) -> None:
    result = pretrain("--steps", "2", "--data", "synthetic", "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout
    assert "no throughput: 2 steps are no more than the 5 of warm-up" in result.stdout
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["status"] == "ok" and len(record["losses"]) == 2
    assert record["tokens_per_second"] is None and record["step_seconds"] is None


def test_a_record_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("of another run")
    result = pretrain("--steps", "2", "--out", str(tmp_path))
    assert result.returncode == 2
    expected = f"Error: out={tmp_path} contains the record of another run; use another directory, or delete that one\n"
    assert result.stdout == expected
    assert (tmp_path / "record.json").read_text() == "of another run"


def test_a_record_is_overwritten_by_what_goes_on_from_it_alone(tmp_path: Path) -> None:
    flags = ["--save", str(tmp_path / "save"), "--data", "synthetic"]
    assert pretrain(*flags, "--steps", "2", "--out", str(tmp_path / "out")).returncode == 0
    assert pretrain("--steps", "3", "--data", "synthetic", "--out", str(tmp_path / "other")).returncode == 0
    flags += ["--load", str(tmp_path / "save"), "--steps", "4", "--out"]
    refused = pretrain(*flags, str(tmp_path / "other"))
    assert refused.returncode == 2 and "contains the record of another run" in refused.stdout
    assert pretrain(*flags, str(tmp_path / "out")).returncode == 0
    assert json.loads((tmp_path / "out" / "record.json").read_text())["first_step"] == 3
    earlier = ["--load", str(tmp_path / "save" / "step-00000002"), "--data", "synthetic", "--steps", "3"]
    assert pretrain(*earlier, "--out", str(tmp_path / "out")).returncode == 0, "what came after may have been bad"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--tp", "4", "--pp", "2"], "tp=4 × cp=1 × pp=2 needs a multiple of 8 processes, but the world size is 2"),
        (["--precision", "bf17"], "precision='bf17' is not known; use one of bf16, fp16, fp8, fp32"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_input_under_torchrun(flags: list[str], sentence: str) -> None:
    result = pretrain(*flags, processes=2)
    assert result.returncode == 1, "torchrun's own status"
    sentences = re.findall(r"^Error: (.*)$", result.stdout, re.MULTILINE)
    assert len(sentences) == 1 and sentence in sentences[0], result.stdout
    root_cause = result.stdout.rpartition("Root Cause")[2]
    assert "exitcode  : 2" in root_cause and sentences[0] in root_cause, "torchrun's report ends with it"
    assert "/megabench/" not in result.stdout, "a traceback of ours"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "llama-tinny"], ["unknown model 'llama-tinny'", "llama-tiny"]),
        (["--save", "/proc"], ["save=/proc is not writable", "use a writable directory"]),
        (["--sketches", "/tmp"], ["sketches=/tmp is a directory", "use the path of a file"]),
        (["--sketches", "/proc/a"], ["sketches=/proc is not writable"]),
        (["--engine", "deepspeed", "--zero-stage", "3", "--tp", "2"], ["ZeRO-3 of the deepspeed", "tp=2", "tp=1"]),
        (["--global-batch", "10"], ["global_batch=10", "4·1"]),
        (["--data", "EMPTY"], ["EMPTY"]),
    ],
)
def test_bad_input_in_one_process(tmp_path: Path, flags: list[str], words: list[str]) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    result = pretrain(*[str(empty) if flag == "EMPTY" else flag for flag in flags])
    assert result.returncode == 2
    assert result.stdout.startswith("Error: ") and result.stdout.count("\n") == 1, result.stdout
    assert all((word if word != "EMPTY" else str(empty)) in result.stdout for word in words)


@pytest.mark.parametrize(
    ("variable", "missing"),
    [("SLURM_STEP_NUM_TASKS", "WORLD_SIZE"), ("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"), ("WORLD_SIZE", "MASTER_ADDR")],
)
def test_processes_that_would_each_train_alone_are_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, missing: str
) -> None:
    monkeypatch.setenv(variable, "4")
    done = pretrain("--steps", "1")
    assert done.returncode == 2 and done.stdout.count("\n") == 1
    assert f"{variable}=4 but no {missing}: each process would train a separate model" in done.stdout
    assert "srun --ntasks-per-node 1 torchrun" in done.stdout


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_launcher_s_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(variable, "abc")
    done = pretrain("--steps", "1")
    assert done.returncode == 2
    assert done.stdout == f"Error: {variable}=abc is not a number; unset it, or let torchrun set it\n"


def test_ctrl_c_is_one_sentence() -> None:
    # started in the background, as CI may be, a process ignores it, and so do its children
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-u", "launch/pretrain.py", *TINY, "--steps", "100000"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeds
    ) as process:
        assert process.stdout and process.stderr
        next(line for line in process.stdout if line.startswith("step "))
        process.send_signal(signal.SIGINT)
        stderr = process.stderr.read()
    assert process.returncode == 128 + signal.SIGINT
    assert "Stopped by Ctrl-C without a save." in stderr and "Traceback" not in stderr
