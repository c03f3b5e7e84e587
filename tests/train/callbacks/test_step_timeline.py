"""A trace is split so that its parts add up; communication beside which nothing computes is exposed."""

import gzip
import json
from typing import Any

import pytest

from megabench.parallel.layout import Layout, differing_axes
from megabench.record import RunRecord
from megabench.train.callbacks.step_timeline import STEP, UPDATE, split
from tests.comparison.compare_process import finish, start, torchrun

LAYOUT = Layout(tp=2, pp=2).with_world_size(4)


def event(name: str, begin: float, end: float, cat: str = "kernel", **arguments: object) -> dict:
    """An event of `begin` to `end` milliseconds."""
    return {"ph": "X", "name": name, "cat": cat, "ts": 1e3 * begin, "dur": 1e3 * (end - begin), "args": arguments}


def nccl(group: str, begin: float, end: float, **arguments: Any) -> dict:
    arguments["Process Group Name"] = group
    return event("ncclDevKernel_AllGather_RING_LL", begin, end, **arguments)


def split_events(*events: dict) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Parts, communication and exposed communication in milliseconds, of a step of 100 with its update from 80."""
    frame = [event(STEP, 0, 100, "user_annotation"), event(UPDATE, 80, 99, "user_annotation")]
    groups = [{"pg_name": "5", "ranks": [0, 1]}, {"pg_name": "7", "ranks": [0, 2]}, {"pg_name": "8", "ranks": [0]}]
    trace = {"traceEvents": [*frame, *events, {"ph": "i"}], "distributedInfo": {"pg_config": groups}}
    result = split(trace, lambda ranks: differing_axes(LAYOUT, ranks))
    assert sum(result.parts.values()) == pytest.approx(result.step)
    return tuple(  # type: ignore[return-value]
        {name: round(1e3 * seconds, 6) for name, seconds in part.items()}
        for part in (result.parts, result.communication, result.exposed)
    )


def test_compute_hides_what_runs_beside_it():
    parts, communication, exposed = split_events(
        event("nvjet_tst_128x256", 10, 40), nccl("5", 20, 30), nccl("5", 35, 50), nccl("7", 48, 60)
    )
    assert parts == {"matrix products": 30, "exposed tp": 8, "exposed pp": 12, "idle": 50}, "two at once count for one"
    assert communication == {"pp": 12, "tp": 25}
    assert exposed == {"pp": 12, "tp": 8}


def test_kernels_are_told_apart_by_name_and_the_optimizer_by_who_launched_it():
    parts, _, _ = split_events(
        event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", 0, 5),
        event("sm90_xmma_gemm_bf16bf16_bf16f32", 5, 15),
        event("triton_poi_fused_silu_mul", 15, 18),
        event("Memcpy HtoD", 18, 20, "gpu_memcpy"),
        event("cudaLaunchKernel", 81, 81.1, "cuda_runtime", correlation=9),
        event("multi_tensor_apply_kernel", 85, 95, correlation=9),
        event("cudaLaunchKernel", 70, 70.1, "cuda_runtime", correlation=8),
        event("reduce_kernel", 82, 84, correlation=8),
        event("aten::mm", 20, 60, "cpu_op"),
    )
    assert parts == {
        "attention": 5,
        "matrix products": 10,
        "optimizer": 10,
        "other compute": 3 + 2,
        "copies": 2,
        "idle": 68,
    }


def test_copy_engines_and_their_signals_are_communication():
    """Other copies, and copies beside products, are not exposed communication."""
    parts, communication, _ = split_events(
        event("nvjet_tst_128x256", 10, 20, stream=7),
        event("Memcpy PtoP (Device -> Device)", 12, 22, "gpu_memcpy", stream=30),
        event("void c10d::symmetric_memory::put_signal_kernel<true>", 22, 23, stream=30),
        event("void c10d::symmetric_memory::wait_signal_kernel<true>", 20, 24, stream=7),
        event("exchange_largest", 24, 25, stream=7),
        event("Memcpy DtoD (Device -> Device)", 30, 33, "gpu_memcpy", stream=7),
    )
    assert parts == {"matrix products": 10, "copies": 3, "exposed tp": 5, "idle": 82}
    assert communication == {"tp": 13}


def test_what_lies_outside_the_step_does_not_count():
    parts, _, _ = split_events(event("gemm", -10, 5), event("gemm", 90, 130), event("gemm", 200, 300))
    assert parts == {"matrix products": 5, "optimizer": 10, "idle": 85}


def test_a_group_without_a_name_goes_by_its_ranks():
    _, communication, _ = split_events(
        nccl("", 0, 10, **{"Process Group Ranks": "[1, 3]"}), nccl("99", 10, 15), nccl("99", 12, 16)
    )
    assert communication == {"pp": 10, "a group": 6}


def test_coalesced_sends_go_by_the_call_before_their_launch():
    def call(group: str, at: float, tid: int) -> dict:
        arguments = {"Process Group Name": group, "Collective name": "send"}
        return event("record_param_comms", at, at + 0.01, "cpu_op", **arguments) | {"tid": tid}

    launch = event("cuLaunchKernelEx", 10, 10.1, "cuda_driver", correlation=3) | {"tid": 1}
    _, communication, _ = split_events(
        call("5", 8, 1), call("7", 9, 1), call("5", 9.5, 2), call("5", 11, 1), launch,
        event("ncclDevKernel_SendRecv", 20, 30, correlation=3),
    )  # fmt: skip
    assert communication == {"pp": 10}


def test_on_cpu_operations_and_gloo_are_what_counts():
    parts, communication, exposed = split_events(
        event("aten::linear", 0, 20, "cpu_op"),
        event("aten::addmm", 5, 15, "cpu_op"),
        event("c10d::allreduce_", 20, 21, "cpu_op"),
        event("gloo:all_reduce", 15, 40, "user_annotation"),
        event("aten::add_", 85, 90, "cpu_op"),
    )
    assert parts == {"matrix products": 20, "optimizer": 5, "exposed a group": 20, "idle": 55}
    assert (communication, exposed) == ({"a group": 25}, {"a group": 20})


@pytest.mark.e2e
def test_a_profiled_run_leaves_traces_and_a_record_whose_parts_add_up(tmp_path):
    flags = ["--model", "llama-tiny", "--num-layers", "2", "--tp", "2", "--steps", "3", "--warmup-steps", "1"]
    command = torchrun(1, 2, *flags, "--profile", "--out", tmp_path, script="launch/pretrain.py")
    status, stdout, stderr = finish(start(command, CUDA_VISIBLE_DEVICES=""))
    assert status == 0, stderr
    record = RunRecord.read(tmp_path / "record.json")
    profile = record.profile
    assert len(record.losses) == 3 and profile
    assert sum(profile.seconds.values()) == pytest.approx(profile.step_seconds, rel=0.03)
    assert profile.seconds["matrix products"] > 0 and profile.seconds["optimizer"] > 0
    communication = profile.communication["a group"]
    assert 0 < communication.exposed_seconds <= communication.seconds
    assert communication.exposed_seconds > 0.5 * communication.seconds, "TP waits for its collectives"
    assert "a profiled step of " in stdout
    for rank in (0, 1):
        with gzip.open(tmp_path / f"trace/rank-{rank}.json.gz") as file:
            assert json.load(file)["traceEvents"]
