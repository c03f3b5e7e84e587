"""Records of versions that did not write all fields."""

import json
from pathlib import Path
from typing import Any

import pytest

from megabench import older_records
from megabench.config import RunConfig
from megabench.engines.common import kernels
from megabench.record import KernelTraits, RunFailure, RunRecord
from tests.engines.cases import cases
from tests.study.records import make_record

NEW = ("failure", "auto_settings", "requested_kernels", "kernel_traits")


def older(folder: Path, **fields: Any) -> RunRecord:
    """A record whose file lacks the new fields."""
    path = folder / "record.json"
    make_record([5.0], **fields).write(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in NEW}))
    return RunRecord.read(path)


@pytest.mark.parametrize(
    ("status", "error", "failure"),
    [
        ("failed", "rank 1 on b was killed by signal 9 (SIGKILL) after step 3 of 9", ("killed", 1)),
        ("failed", "rank 2 was killed by signal 7 (SIGBUS)", ("shared-memory", 2)),
        ("failed", "rank 0 failed: NCCL error: creating shared memory segment /dev/shm/x", ("shared-memory", 0)),
        ("failed", "rank 0 failed after step 2 of 9: no progress for 9 s: rank 5 (b) stands in recv", ("hang", 5)),
        ("failed", "rank 3 failed: ValueError: no", ("error", 3)),
        ("failed", "stopped by SIGTERM", ("error", None)),
        ("failed", None, ("error", None)),
        ("oom", "rank 1 ran out of memory: CUDA out of memory", ("oom", 1)),
        ("timeout", "no result after 2 s (timeout_seconds): rank 3 in x (x.py:1), 2 of 9 steps done", ("hang", 3)),
        ("timeout", None, ("hang", None)),
    ],
)
def test_the_cause_is_read_from_the_sentence(
    status: str, error: str | None, failure: tuple[Any, int | None], tmp_path: Path
) -> None:
    kind, rank = failure
    assert older(tmp_path, status=status, error=error).failure == RunFailure(kind=kind, rank=rank)


@pytest.mark.parametrize("status", ["ok", "diverged"])
def test_a_run_with_a_result_did_not_fail(status: str, tmp_path: Path) -> None:
    assert older(tmp_path, status=status, error="rank 1 differs").failure is None


def test_settings_are_read_from_the_command(tmp_path: Path) -> None:
    record = older(tmp_path, command="launch/pretrain.py --micro-batch auto --recompute auto --kernels reference")
    assert (record.auto_settings, record.requested_kernels) == (["micro_batch", "recompute"], "reference")
    record = older(tmp_path, command="launch/pretrain.py --micro-batch 4")
    assert (record.auto_settings, record.requested_kernels) == ([], "auto")


def test_what_is_written_counts_whatever_the_words_say(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "status": "failed",
        "error": "rank 1 was killed by signal 9 (SIGKILL)",
        "failure": RunFailure(kind="error", rank=0),
        "command": "--micro-batch auto --kernels reference",
        "auto_settings": [],
        "requested_kernels": "auto",
        "kernels": {"attention": "transformers eager"},
        "kernel_traits": None,
    }
    record = make_record([5.0], **fields)
    record.write(tmp_path / "record.json")
    assert RunRecord.read(tmp_path / "record.json") == record
    assert all(getattr(record, name) == fields[name] for name in NEW)


def test_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for text in ("[1]", "{no", '{"kernels": 1, "error": 2, "command": 3}'):
        path.write_text(text)
        with pytest.raises(ValueError):
            RunRecord.read(path)


RUNS: dict[str, dict[str, Any]] = cases("KERNELS")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("has_liger", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_the_names_of_kernels_tell_the_traits_that_engines_write(
    name: str, has_liger: bool, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda module: module if has_liger else None)
    monkeypatch.setattr(kernels, "kernel_name", lambda *of: "cuDNN 9.19.0")  # this machine may have no GPU
    run = RunConfig(**RUNS[name]).resolve(8, device)
    megatron = run.engine == "megatron"
    names = (kernels.names_for_megatron if megatron else kernels.names_for_transformers)(run)
    traits = (kernels.traits_for_megatron if megatron else kernels.traits_for_transformers)(run)
    found = KernelTraits(**older_records.complete({"kernels": names})["kernel_traits"])
    assert found == traits.model_copy(update={"adds_output_gradient": False})  # names without traits do not tell it
    written = traits.model_dump(exclude={"adds_output_gradient"})
    found = KernelTraits(**older_records.complete({"kernels": names, "kernel_traits": written})["kernel_traits"])
    assert found == traits
