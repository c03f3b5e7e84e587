"""Launchers: what their variables mean, and what is said of those that are missing or wrong."""

import os

import pytest

from megabench.runtime import launcher
from megabench.runtime.launcher import (
    LauncherError,
    check_launcher,
    forget_single_pod,
    launcher_rank,
    local_rank_from_environment,
    local_world_size_from_environment,
)

# what an operator of Kubernetes gives to the second of four pods, and the parts that each launcher adds or changes
POD = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "29500"}
TORCHRUN = POD | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ONE_POD = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(launcher, "_RESOLVE_SECONDS", 0.0)


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "num_gpus", "words"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, 1, ["RANK and WORLD_SIZE and MASTER_PORT are not", "torchrun", "unset"]),
        (ONE_POD | {"MASTER_ADDR": "node_0.cluster"}, 1, ["MASTER_ADDR=node_0.cluster cannot be resolved", "Service"]),
        (ONE_POD | {"MASTER_ADDR": "a" * 70 + ".b"}, 1, ["cannot be resolved"]),
        (ONE_POD, 8, ["count pods", "8 GPUs", "each pod: torchrun --nproc-per-node 8 -m megabench.train --tp 8"]),
        (POD, 8, ["WORLD_SIZE=4", '--nnodes "$WORLD_SIZE" --node-rank "$RANK"', "--nproc-per-node 8"]),
        (POD | {"RANK": "4"}, 1, ["RANK=4 is not smaller than WORLD_SIZE=4"]),
        (POD | {"SLURM_LOCALID": "x"}, 1, ["SLURM_LOCALID=x is not a number"]),
        ({"SLURM_STEP_NUM_TASKS": "8"}, 1, ["SLURM_STEP_NUM_TASKS=8 but no WORLD_SIZE", "srun --ntasks-per-node 1"]),
    ],
)
def test_what_cannot_work_is_said(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], num_gpus: int, words: list[str]
) -> None:
    set_variables(monkeypatch, variables)
    with pytest.raises(LauncherError) as caught:
        check_launcher(num_gpus, ["--tp", "8"])
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("variables", "num_gpus"),
    [
        ({}, 8),
        (ONE_POD, 1),
        (POD, 1),
        (POD, 0),
        (TORCHRUN, 8),
        (POD | {"SLURM_LOCALID": "1"}, 8),
        (ONE_POD | {"MASTER_ADDR": "::1"}, 1),
    ],
)
def test_what_works_is_not_refused(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], num_gpus: int) -> None:
    set_variables(monkeypatch, variables)
    check_launcher(num_gpus)


def test_brackets_of_an_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, ONE_POD | {"MASTER_ADDR": "[::1]"})
    check_launcher(1)
    assert os.environ["MASTER_ADDR"] == "::1"


@pytest.mark.parametrize(
    ("variables", "local_rank", "local_world_size"),
    [
        ({}, 0, 1),
        (POD, 0, 1),  # pods of one GPU
        (TORCHRUN, 1, 2),
        (POD | {"SLURM_LOCALID": "1", "LOCAL_WORLD_SIZE": "4"}, 1, 4),
        (POD | {"MASTER_ADDR": "127.0.0.1"}, 1, 4),  # four processes that were started by hand on one machine
    ],
)
def test_the_place_on_the_host(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], local_rank: int, local_world_size: int
) -> None:
    set_variables(monkeypatch, variables)
    assert (local_rank_from_environment(), local_world_size_from_environment()) == (local_rank, local_world_size)


@pytest.mark.parametrize(
    ("variables", "rank"), [(ONE_POD, None), (ONE_POD | {"LOCAL_RANK": "0"}, 0), (POD, 1), (TORCHRUN, 1)]
)
def test_a_job_of_one_pod_has_no_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rank: int | None
) -> None:
    set_variables(monkeypatch, variables)
    forget_single_pod()
    assert launcher_rank() == rank
    assert ("MASTER_ADDR" in os.environ) == (rank is not None)
