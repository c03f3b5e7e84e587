"""The rank that `megabench train` names after a failure."""

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megabench.train.torchrun import root_cause


def failure(folder: Path, rank: int, exitcode: int, error: str | None, is_printed: bool = False) -> ProcessFailure:
    path = folder / f"{rank}.json"
    if error is not None:
        extra = {"timestamp": "1700000000", "is_printed": is_printed}
        path.write_text(json.dumps({"message": {"message": error, "extraInfo": extra}}))
    return ProcessFailure(local_rank=rank, pid=1, exitcode=exitcode, error_file=str(path))


@pytest.mark.parametrize("lost", ["Connection closed by peer [10.0.0.1]", "NCCL error: ncclRemoteError", "Broken pipe"])
def test_a_rank_that_lost_its_peer_is_not_the_cause(tmp_path: Path, lost: str) -> None:
    failures = {0: failure(tmp_path, 0, 1, f"RuntimeError: {lost}"), 1: failure(tmp_path, 1, 1, "ValueError: no layer")}
    assert root_cause(failures) == "rank 1 failed: ValueError: no layer"


def test_a_killed_rank_is_the_cause(tmp_path: Path) -> None:
    failures = {0: failure(tmp_path, 0, 1, "ValueError: no layer"), 1: failure(tmp_path, 1, -9, None)}
    assert (root_cause(failures) or "").startswith("rank 1 was killed by signal 9 (SIGKILL)")


def test_a_rank_that_torchrun_ended_is_not_the_cause(tmp_path: Path) -> None:
    failures = {0: failure(tmp_path, 0, -15, None), 1: failure(tmp_path, 1, 3, None)}
    assert root_cause({1: failures[1], 0: failures[0]}) == "rank 1 ended with exit status 3"


def test_what_a_rank_has_printed_is_not_repeated(tmp_path: Path) -> None:
    assert root_cause({0: failure(tmp_path, 0, 1, "the loss is nan", is_printed=True)}) is None
