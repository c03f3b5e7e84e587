"""Text that no file can contain is refused or escaped, and modules of the working directory are ignored.

A process also ends with its status while gloo still works in it.
"""

import gc
import io
import json
import os
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from megabench.errors import printable
from megabench.record import Environment, RunRecord
from megabench.runtime import environment
from megabench.runtime.child import Child
from megabench.runtime.process import ArgumentError, collect_garbage, host_name, set_up_process
from tests.study.records import make_record

BAD = os.fsdecode(b"a\xff")  # as Python decodes a byte that is not valid text


@pytest.fixture(autouse=True)
def unsafe_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # restored after the test, which changes it


@pytest.mark.parametrize("text", [BAD, "\ud800", "\udc80\udcff"])
def test_printable_text_is_ascii_where_the_text_could_not_be_encoded(text: str) -> None:
    assert printable(text).encode().isascii() and printable(f"é{text}").startswith("é\\ud") == (text != BAD)
    assert printable("é → 猫\n") == "é → 猫\n"


def test_an_argument_that_is_not_valid_text_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"the argument runs/a\\udcff contains a byte that is not valid utf-8"):
        set_up_process(["--out", f"runs/{BAD}"])
    set_up_process(["--out", "runs/é"])


def test_garbage_is_collected_after_the_imports() -> None:
    class Node:
        itself: "Node"

    def circle() -> weakref.ref[Node]:
        node = Node()
        node.itself = node
        return weakref.ref(node)

    set_up_process([])
    assert not gc.isenabled()
    collect_garbage()
    assert gc.isenabled()
    left = circle()
    gc.collect()
    assert left() is None
    gc.unfreeze()


def test_standard_output_escapes_what_it_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    set_up_process([])
    stream.write(f"0.1 s · {BAD}")
    stream.flush()
    assert written.getvalue() == b"0.1 s \\xb7 a\\udcff"


def test_a_record_with_any_strings_can_be_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NET_PLUGIN", BAD)
    monkeypatch.setattr(socket, "gethostname", lambda: BAD)
    found = environment.collect()
    assert (found.variables["NCCL_NET_PLUGIN"], found.host, host_name()) == ("a\\udcff",) * 3
    record = make_record(
        [1.0],
        trial=BAD,
        command=f"train --out {BAD}",
        extra={"Mine": {BAD: [BAD, {"deep": (BAD,)}]}},
        environment=found,
    ).model_copy(update={"error": BAD, "warnings": [BAD]})
    record.write(tmp_path / "record.json")
    again = RunRecord.read(tmp_path / "record.json")
    assert again == record and again.extra == {"Mine": {"a\\udcff": ["a\\udcff", {"deep": ["a\\udcff"]}]}}
    assert (again.trial, again.error, again.warnings) == ("a\\udcff", "a\\udcff", ["a\\udcff"])
    assert isinstance(again.environment, Environment)


def test_a_child_imports_nothing_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "psutil.py").write_text("print('executed')")
    monkeypatch.chdir(tmp_path)
    child = Child([sys.executable, "-c", "import psutil; print('done')"], os.environ, tmp_path / "log")
    deadline = time.monotonic() + 240
    while child.exit_status() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "log").read_text() == "done\n"


TINY = ["--model", "llama-tiny", "--num-layers", "1", "--seq-length", "16", "--steps", "2", "--device", "cpu"]
ROOT = Path(__file__).parents[2]


def megabench(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """The installed command, started in `folder`."""
    command = [sys.executable, str(Path(sys.executable).with_name("megabench")), *arguments]
    changes = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": ""}
    return subprocess.run(
        command, cwd=folder, env=os.environ | changes | variables, capture_output=True, timeout=240, check=False
    )


STUDY = """
name: two
base: {model: llama-tiny, num_layers: 1, seq_length: 16, steps: 2, warmup_steps: 1, device: cpu, global_batch: 2,
  micro_batch: 1, world_size: 2}
trials: [{engine: ddp}, {tp: 2}]
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory with modules that leave a marker when they are imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in ("pydantic", "yaml", "torch", "numpy", "multiprocessing", "json", "random", "psutil", "transformers"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write('{name} ')\n")
    (folder / "study.yaml").write_text(STUDY)
    (folder / "text.txt").write_text("some text " * 100)
    return folder


@pytest.mark.e2e
@pytest.mark.parametrize(
    "arguments",
    [
        ["train", *TINY, "--nproc", "1"],
        ["train", *TINY, "--nproc", "2"],
        ["compare", "study.yaml", "--out", "out"],
        ["plan", "--model", "llama-tiny", "--cluster", "p5.48xlarge:1", "--global-batch", "8"],
        ["preprocess", "text.txt", "--out", "tokens", "--tokenizer", "TOKENIZER", "--workers", "2"],
    ],
    ids=["train-alone", "train", "compare", "plan", "preprocess"],
)
def test_a_command_executes_no_module_of_the_working_directory(
    hostile: Path, tokenizer_dir: Path, arguments: list[str]
) -> None:
    done = megabench(hostile, *(str(tokenizer_dir) if word == "TOKENIZER" else word for word in arguments))
    marker = hostile.parent / "executed"
    assert not marker.exists(), marker.read_text()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.e2e
def test_a_callback_of_the_working_directory_is_found_last(hostile: Path) -> None:
    (hostile / "mine.py").write_text(
        "from megabench.train.callbacks import Callback\nimport helper\n\n\nclass Mine(Callback):\n"
        "    def section(self, by_rank):\n        return {'value': helper.VALUE, 3: object}\n"
    )
    (hostile / "helper.py").write_text("VALUE = 7\n")
    done = megabench(hostile, "train", *TINY, "--nproc", "1", "--out", "run", "--callbacks", "mine:Mine")
    assert done.returncode == 0 and not (hostile.parent / "executed").exists(), done.stdout + done.stderr
    assert RunRecord.read(hostile / "run" / "record.json").extra == {"Mine": {"value": 7, "3": "<class 'object'>"}}


@pytest.mark.e2e
def test_a_run_whose_environment_is_not_valid_text_keeps_its_results(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "mine.py").write_text(
        "from megabench.train.callbacks import Callback\n\n\nclass Mine(Callback):\n"
        "    def on_training_end(self):\n        1 / 0\n"
        "    def section(self, by_rank):\n        return {(1, 2): 3}\n"
    )
    bad = {
        "NCCL_NET_PLUGIN": BAD,
        "OMP_PLACES": os.fsdecode(b"\xfe"),
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    done = megabench(
        folder, "train", *TINY, "--nproc", "2", "--out", "run", "--callbacks", "mine:Mine", "--save", "save", **bad
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = RunRecord.read(folder / "run" / "record.json")
    assert record.environment and record.environment.variables["NCCL_NET_PLUGIN"] == "a\\udcff"
    assert len(record.losses) == 2
    assert [warning for warning in record.warnings if "callback" in warning] == [
        "callback Mine failed at the end of the run: ZeroDivisionError: division by zero",
        "callback Mine failed at the end of the run: TypeError: keys must be str, int, float, bool or None, not tuple",
    ]
    refused = megabench(folder, "train", *TINY, "--out", os.fsdecode(b"r\xff"))
    assert refused.returncode == 2 and refused.stderr.decode().startswith("Error: the argument r\\udcff contains a")
    assert json.loads((folder / "run" / "record.json").read_bytes())["trial"] == "run"


# The first exit function is called last, and holds the interpreter while gloo ends its work: its threads wait then.
# What is taken down with the interpreter waits for them in turn.
BUSY = """
import atexit, ctypes, sys, threading, time
atexit.register(ctypes.PyDLL(None).usleep, 1_500_000)
import torch
import torch.distributed as dist
from megabench.runtime.process import end, exit_process, skip_shutdown

class Waits:
    def __del__(self, sleep=time.sleep):
        sleep(20)  # ends with the process, as soon as one of gloo's threads needs the interpreter

store, sys.groups, waits = dist.HashStore(), [], Waits()
def join(rank):
    sys.groups.append(dist.ProcessGroupGloo(store, rank, 2))
threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
atexit.register(print, "exit function")
for _ in range(20):  # too many to be done before the exit functions begin
    for group in sys.groups:
        group.allreduce(torch.ones(5_000_000))
print("done")
"""


def run_busy(last_line: str) -> subprocess.CompletedProcess[str]:
    """Runs BUSY and `last_line`."""
    return subprocess.run([sys.executable, "-c", BUSY + last_line], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("last_line", ["exit_process(3)", "skip_shutdown(); end(3)"])
def test_a_process_that_gloo_still_works_in_ends_with_its_status(last_line: str) -> None:
    left = run_busy(last_line)
    assert (left.returncode, left.stdout) == (3, "done\nexit function\n"), left.stderr


@pytest.mark.parametrize("last_line", ["sys.exit(3)", "end(3)"])
def test_taking_the_interpreter_down_would_abort_it(last_line: str) -> None:
    """On a busy machine, gloo's work may end before the interpreter does. One of several runs is aborted."""
    runs = (run_busy(last_line) for _ in range(5))
    assert any(ended.returncode == -6 and "terminate called" in ended.stderr for ended in runs)


def test_the_status_is_kept_where_nobody_reads_the_output() -> None:
    code = """
import os, sys
from megabench.runtime.process import exit_process
read, write = os.pipe()
os.close(read)
sys.stdout = os.fdopen(write, "w")
print("done")
exit_process(3)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")
