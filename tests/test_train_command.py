"""`megabench train`: processes are started after all checks, and the settings are those of launch/pretrain.py."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megabench.cli.preprocess import write_tokens
from megabench.data.tokenizer import ByteTokenizer
from megabench.record import RunRecord

TINY = ["--model", "llama-tiny", "--num-layers", "2", "--seq-length", "32", "--device", "cpu", "--steps", "2"]
LAUNCHER = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "0"}


def train(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megabench", "train", *flags]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])} | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.e2e
@pytest.mark.parametrize(("flags", "world_size"), [(["--tp", "2"], 2), (["--nproc", "1"], 1)])
def test_it_starts_as_many_processes_as_the_layout_needs_or_the_user_says(
    tmp_path: Path, flags: list[str], world_size: int
) -> None:
    result = train(tmp_path, *TINY, *flags, "--out", "run")
    assert result.returncode == 0, result.stderr
    record = RunRecord.read(tmp_path / "run" / "record.json")
    assert (record.world_size, record.num_steps) == (world_size, 2)
    assert record.command.startswith(f"torchrun --nproc-per-node {world_size} -m megabench.train --model llama-tiny")


@pytest.mark.e2e
def test_an_operator_s_variables_of_one_pod_start_no_other_number_of_processes(tmp_path: Path) -> None:
    pod = {name: value for name, value in LAUNCHER.items() if name != "LOCAL_RANK"}
    result = train(tmp_path, *TINY, "--tp", "2", "--nproc", "2", "--out", "run", **pod)
    assert result.returncode == 0, result.stderr
    assert RunRecord.read(tmp_path / "run" / "record.json").world_size == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tpp", "2"], "unknown option --tpp; did you mean --tp"),
        (["--nprocs", "2"], "unknown option --nprocs; did you mean --nproc"),
        ([*TINY, "--data", "nowhere.txt", "--nproc", "2"], "data=nowhere.txt does not exist"),
        ([*TINY, "--tp", "4", "--nproc", "2"], "torchrun --nproc-per-node 4 -m megabench.train"),
        ([*TINY, "--tp", "2", "--nproc", "3"], "needs a multiple of 2 processes, but the world size is 3"),
        (["--tp", "8", "--pp", "2", "--device", "cpu"], "llama3-8b needs about"),
    ],
)
def test_what_cannot_run_is_one_sentence_and_2(tmp_path: Path, flags: list[str], words: str) -> None:
    result = train(tmp_path, *flags)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ") and words in result.stderr and result.stderr.count("\n") == 1


def write_tokens_with(prefix: Path, token: int) -> None:
    """A token file with this token in the middle, such as the -100 of a loss mask."""
    tokens = np.full(3000, 7, dtype=np.int32)
    tokens[2000] = token
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, 1, 2)
    prefix.with_suffix(".idx").write_bytes(header + struct.pack("<iqqq", len(tokens), 0, 0, 1))


@pytest.mark.e2e
@pytest.mark.parametrize("flags", [["--tp", "2"], ["--engine", "ddp", "--nproc", "2"], ["--nproc", "1"]])
def test_tokens_outside_the_vocabulary_are_one_sentence_and_2(tmp_path: Path, flags: list[str]) -> None:
    write_tokens_with(tmp_path / "tokens", -100)
    result = train(tmp_path, *TINY, "--data", "tokens", *flags)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: data=tokens contains token -100, but") and result.stderr.count("\n") == 1


CORRUPTION = """
import numpy as np
from megabench.train.callbacks import Callback

class Corruption(Callback):
    def on_step_end(self, step):
        np.memmap("tokens.bin", dtype=np.int32, mode="r+")[:] = -100
"""


@pytest.mark.e2e
@pytest.mark.parametrize("flags", [["--tp", "2"], ["--engine", "fsdp", "--nproc", "2"]])
def test_a_token_file_that_changes_during_training_ends_the_run(tmp_path: Path, flags: list[str]) -> None:
    write_tokens_with(tmp_path / "tokens", 7)
    (tmp_path / "corruption.py").write_text(CORRUPTION)
    result = train(tmp_path, *TINY, "--data", "tokens", "--callbacks", "corruption:Corruption", *flags)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert result.stderr.count("Error: data=tokens contains token -100 in tokens ") == 1
    assert "step 1/2" in result.stdout and "step 2/2" not in result.stdout


FAILING = """
import os, signal
from megabench.train.callbacks import Callback

class Failing(Callback):
    def __init__(self, kills):
        self.kills = kills

    def on_start(self, trainer):
        self.rank = trainer.rank

    def on_step_end(self, step):
        if self.rank == 1 and step.number == 3:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the third step is one too many")
"""
KILLED = "Error: rank 1 was killed by signal 9 (SIGKILL); on Linux that is often the out-of-memory killer"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("kills", "cause"), [(True, KILLED), (False, "Error: rank 1 failed: RuntimeError: the third step is one too many")]
)
def test_a_failed_rank_is_one_sentence_with_the_command_that_resumes(tmp_path: Path, kills: bool, cause: str) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    flags = ["--steps", "6", "--save", "s", "--save-every", "1", "--engine", "ddp"]
    result = train(tmp_path, *TINY[:-2], *flags, "--nproc", "2", "--callbacks", f"failing:Failing(kills={kills})")
    assert result.returncode == 1
    *_, sentence, resume, command = result.stderr.splitlines()
    assert sentence == cause and resume == "To resume from the newest checkpoint:"
    assert command.startswith("  megabench train --nproc 2 --model llama-tiny ") and command.endswith(" --load s")
    assert "ChildFailedError" not in result.stderr and "torch.distributed.elastic" not in result.stderr


@pytest.mark.e2e
def test_a_refusal_by_the_ranks_has_the_same_status_and_no_traceback(tmp_path: Path, tokenizer_dir: Path) -> None:
    """Only the ranks tokenize text, so that they find tokens outside the vocabulary."""
    shutil.copytree(tokenizer_dir, tmp_path / "t")
    content = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    content["model"]["vocab"]["<late>"] = 600
    content["added_tokens"].append({**content["added_tokens"][0], "id": 600, "content": "<late>"})
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "corpus.txt").write_text("some text <late> " * 100)
    result = train(tmp_path, *TINY, "--data", "corpus.txt", "--tokenizer", "t", "--tp", "2")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.count("Error: data=corpus.txt contains token 600") == 1


@pytest.mark.e2e
def test_the_log_and_the_record_name_the_tokenizer(tmp_path: Path) -> None:
    result = train(tmp_path, *TINY, "--out", "run")
    record = RunRecord.read(tmp_path / "run" / "record.json")
    assert record.tokenizer == ByteTokenizer.used
    assert f"data stdlib · tokenizer bytes (257 tokens, sha256 {record.tokenizer.sha256[:12]})" in result.stdout
    result = train(tmp_path, *TINY, "--data", "synthetic")
    assert "data synthetic\n" in result.stdout
    (tmp_path / "corpus.txt").write_text("some text " * 100)
    write_tokens([tmp_path / "corpus.txt"], tmp_path / "o", "bytes", workers=1, append_eod=True)
    (tmp_path / "o.json").unlink()
    assert "data o · tokenizer not known\n" in train(tmp_path, *TINY, "--data", "o").stdout


def test_nproc_is_not_for_launchers(tmp_path: Path) -> None:
    result = train(tmp_path, *TINY, "--nproc", "2", **LAUNCHER)
    assert result.returncode == 2 and "--nproc-per-node" in result.stderr


def test_tasks_of_srun_without_torchrun_are_refused(tmp_path: Path) -> None:
    result = train(tmp_path, *TINY, "--nproc", "2", SLURM_STEP_NUM_TASKS="4")
    assert result.returncode == 2 and "each process would train a separate model" in result.stderr
    result = train(tmp_path, *TINY, **LAUNCHER | {"RANK": "first"})
    assert (result.returncode, result.stderr.count("\n")) == (2, 1) and "RANK=first is not a number" in result.stderr


def test_settings_are_completed(tmp_path: Path) -> None:
    variables = {"_MEGABENCH_COMPLETE": "complete_bash", "COMP_WORDS": "megabench train --zero-s", "COMP_CWORD": "2"}
    assert train(tmp_path, **variables).stdout.split() == ["--zero-stage"]


def test_help_lists_the_settings(tmp_path: Path) -> None:
    result = train(tmp_path, "--help")
    assert result.returncode == 0 and result.stdout.startswith("Usage: megabench train [OPTIONS]")
    assert "--tp" in result.stdout and "--nproc <int>" in result.stdout
