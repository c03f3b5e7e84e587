"""How tensor-parallel ranks exchange activations is decided from the links between their GPUs, before CUDA starts."""

from dataclasses import replace
from typing import Any

import pytest

from megabench.config import ConfigError, ResolvedConfig, RunConfig
from megabench.hardware.topology import Topology, split
from megabench.parallel.placement import place
from megabench.train.rank_setup import settle
from tests.planner.jobs import cluster, hosts

NVLINK = hosts(1, 2)
LONG: dict[str, Any] = {"model": "llama3-8b", "tp": 2, "seq_length": 8192, "micro_batch": 1, "global_batch": 1}


def resolve(topology: Topology, **fields: Any) -> ResolvedConfig:
    return RunConfig(**LONG | fields).resolve(topology.world_size, "cuda")


def settled(topology: Topology, **fields: Any) -> tuple[ResolvedConfig, str | None]:
    run = resolve(topology, **fields)
    return settle(run, place(topology, run.layout, run.placement))


@pytest.mark.parametrize("given", [None, "auto"])
def test_copies_overlap_long_products(given: str | None) -> None:
    run, sentence = settled(NVLINK, tp_overlap=given)
    assert run.options["tp_overlap"] == "copy-engines" and sentence is None
    assert run.spec.environment(run) == {}


SHORT = {"seq_length": 512}
NCCL: dict[str, tuple[Topology, dict[str, Any], str]] = {
    "short products": (NVLINK, SHORT, "the products of 512 tokens end before"),
    "short products of more ranks": (hosts(1, 8), {"tp": 8}, "the products of 8192 tokens end before"),
    "short products in fp8": (NVLINK, {"seq_length": 2048, "precision": "fp8"}, "the products of 2048 tokens"),
    "other layers": (NVLINK, {"kernels": "reference"}, "kernels=reference uses megatron-core's layers"),
    "kept inputs": (NVLINK, {"keep_gathered": True}, "keep_gathered keeps"),
    "several hosts": (hosts(2, 1), {}, "the TP group of ranks 0 to 1 spans several hosts"),
    "emulated hosts": (split(NVLINK, 2), {}, "the TP group of ranks 0 to 1 spans several hosts"),
    "no NVLink": (cluster("g5.48xlarge:1:2"), {}, "the TP group of ranks 0 to 1 communicates over"),
}


@pytest.mark.parametrize("case", NCCL)
def test_nccl_where_copies_do_not_pay(case: str) -> None:
    topology, fields, why = NCCL[case]
    run, sentence = settled(topology, **fields)
    assert run.options["tp_overlap"] == "nccl"
    assert sentence and sentence.startswith("tensor parallelism uses NCCL (tp_overlap=nccl), because ")
    assert why in sentence
    assert run.spec.environment(run) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def with_last_host(topology: Topology, **facts: Any) -> Topology:
    *others, last = topology.hosts
    return replace(topology, hosts=(*others, replace(last, **facts)))


def test_one_hardware_queue_leaves_no_room_for_copies() -> None:
    """On any host, because all ranks must decide alike."""
    for several in (hosts(1, 2), hosts(2, 2)):
        run, sentence = settled(with_last_host(several, has_one_queue=True), global_batch=2)
        assert run.options["tp_overlap"] == "nccl" and sentence and "sets CUDA_DEVICE_MAX_CONNECTIONS=1" in sentence
    with pytest.raises(ConfigError, match=r"is impossible, because the environment sets .*; use tp_over"):
        settled(with_last_host(NVLINK, has_one_queue=True), tp_overlap="copy-engines")


def test_processes_that_see_only_their_own_gpu_use_nccl() -> None:
    run, sentence = settled(with_last_host(NVLINK, sees_one_gpu=True))
    assert run.options["tp_overlap"] == "nccl" and sentence and "sees only its own GPU" in sentence


def test_copies_across_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match="because the TP group of ranks 0 to 1 spans several hosts; use tp_overlap=n"):
        settled(hosts(2, 1), tp_overlap="copy-engines")


def test_given_values_are_kept() -> None:
    """Also where the other way would be faster."""
    for way, fields in (("copy-engines", SHORT), ("nccl", {})):
        run, sentence = settled(NVLINK, tp_overlap=way, **fields)
        assert run.options["tp_overlap"] == way and sentence is None


def test_nothing_to_decide_without_tensor_parallelism() -> None:
    run, sentence = settled(NVLINK, tp=1, global_batch=2)
    assert run.options["tp_overlap"] is None and sentence is None
