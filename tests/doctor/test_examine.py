"""The doctor: each planted fault is found, alone, and a good study has no finding."""

import io
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from megabench.doctor import Finding, examine
from megabench.doctor.write_findings import WELL, findings_at, write, write_head
from megabench.record import (
    EmulatedNetworkUsed,
    Environment,
    Fp8Work,
    Group,
    LayoutSizes,
    Machine,
    PeakMemory,
    PlacementUsed,
    Probe,
    RunFailure,
    RunRecord,
    StepSeconds,
    read_records,
    write_records,
)
from megabench.study.parity import judge_parity
from tests.comparison.compare_process import REPOSITORY
from tests.engines.cases import cases
from tests.study.records import make_record, work_class

LOSSES = [6.0, 5.5, 5.2]
KERNELS = {
    "attention": "torch scaled_dot_product_attention",
    "norm": "Liger RMSNorm",
    "activation": "Liger SwiGLU",
    "cross_entropy": "megabench linear_cross_entropy, in chunks",
}
FUSED = dict.fromkeys(("flash_attention", "fused_norm", "fused_activation", "fused_loss"), True)
PLAIN = {
    "kernels": KERNELS | {"norm": "transformers RMSNorm", "cross_entropy": "torch, fp32 logits"},
    "kernel_traits": FUSED | {"fused_norm": False, "fused_loss": False},
}
WORK = {"model": "llama3-8b", "precision": "bf16", "global_batch": 32, "seq_length": 4096}


def seconds(*steps: float) -> StepSeconds:
    ordered = sorted(steps)
    return StepSeconds(median=ordered[len(steps) // 2], p10=ordered[0], p90=ordered[-1], all=list(steps))


def record(trial: str, **changes: Any) -> RunRecord:
    """A good run of Llama-3-8B on two hosts of four GPUs."""
    fields: dict[str, Any] = {
        "trial": trial,
        "model": "llama3-8b",
        "num_parameters": 8_030_261_248,
        "work_class": work_class(**WORK),
        "layout": LayoutSizes(tp=4, cp=1, pp=2, vp=1, dp=1),
        "world_size": 8,
        "num_hosts": 2,
        "device": "NVIDIA H200",
        "device_memory_gib": 139.8,
        "peak_memory_gib": PeakMemory(max=100.0, per_rank=[100.0] * 8),
        "gpu_utilization": 0.98,
        "precision": "bf16",
        "seq_length": 4096,
        "micro_batch": 1,
        "global_batch": 32,
        "kernels": KERNELS,
        "kernel_traits": FUSED,
        "num_steps": 15,
        "warmup_steps": 5,
        "first_step_seconds": 6.0,
        "step_seconds": seconds(*[2.0, 2.01, 1.99, 2.0, 2.02, 2.0, 1.99, 2.01, 2.0, 2.0]),
        "grad_norms": LOSSES,
        "groups": [
            Group(kind="tp", ranks=[0, 1, 2, 3], link="nvlink", transport="P2P/CUMEM"),
            Group(kind="pp", ranks=[0, 4], link="efa", transport="NET/Libfabric/GDRDMA"),
        ],
        "placement": PlacementUsed(policy="topology", launcher_ranks=list(range(8)), hosts=[], nccl_num_nodes=2),
        "machines": [machine("a"), machine("b")],
        "probes": [],
        "environment": Environment(versions={"torch": "2.11.0", "liger-kernel": "0.8.5"}, variables={}),
    }
    losses = changes.pop("losses", LOSSES)
    return make_record(losses, **fields | changes)


def machine(host: str = "a", **changes: object) -> Machine:
    fields = {
        "instance_type": "p5e.48xlarge",
        "shm_total_gib": 128.0,
        "shm_free_gib": 128.0,
        "num_other_gpu_processes": 0,
        "other_gpu_processes_gib": 0.0,
        "throttle": {"power cap": 0.9},
        "power_limit_share": 1.0,
        "nic_distance": "switch",
        "compile_cache": "/fsx/cache",
        "is_compile_cache_kept": True,
    }
    return Machine.model_validate(fields | {"host": host} | changes)


def tp(**changes: Any) -> list[RunRecord]:
    """Three runs of the trial that carries the planted fault."""
    speeds = changes.pop("speeds", (9100.0, 9150.0, 9120.0))
    return [record("tp4-pp2", repeat=number, speed=speed, **changes) for number, speed in enumerate(speeds)]


ZERO3 = {"engine": "deepspeed", "layout": LayoutSizes(tp=1, cp=1, pp=1, vp=1, dp=8)}
ZERO3_OPTIONS = {
    "zero_stage": 3,
    "recompute": "none",
    "offload": "none",
    "zero_leaf_layers": True,
    "reshard_after_forward": False,
}
DP = [Group(kind="dp", ranks=list(range(8)), link="efa", transport="NET/Libfabric/GDRDMA")]


def zero3(name: str = "zero3", **changes: Any) -> list[RunRecord]:
    speeds = changes.pop("speeds", (8000.0, 8050.0, 8020.0))
    fields = ZERO3 | {"options": ZERO3_OPTIONS, "groups": DP, "micro_batch": 2} | changes
    return [record(name, repeat=number, speed=speed, **fields) for number, speed in enumerate(speeds)]


def study(*trials: list[RunRecord]) -> list[RunRecord]:
    return [run for runs in trials for run in runs]


def look(*trials: list[RunRecord], reference: str = "zero3") -> list[Finding]:
    return examine(judge_parity(study(*trials), reference), reference)


def lost(trial: str, status: str, error: str, **changes: object) -> list[RunRecord]:
    measured = (
        *("work_class", "step_seconds", "tokens_per_second", "tokens_per_second_per_device", "peak_memory_gib"),
        *(
            "kernels",
            "kernel_traits",
            "device_memory_gib",
            "environment",
            "placement",
            "model_tflops_per_device",
            "gpu_utilization",
        ),
    )
    fields = dict.fromkeys(measured) | {"status": status, "error": error, "machines": [], "groups": []}
    return [record(trial, losses=[], **fields | changes)]


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


def test_a_good_study_is_silent():
    assert look(zero3(), tp()) == []


def test_a_good_study_on_cpu_is_silent():
    shapes: dict[str, Any] = {"device": "cpu", "device_memory_gib": None, "machines": [machine(shm_total_gib=0.06)]}
    assert look(zero3(**shapes, precision="fp32"), tp(**shapes, precision="fp32")) == []
    old = [
        make_record([6.0], 1000, trial="zero3", engine="deepspeed", options={"zero_stage": 3}),
        make_record([6.0], 1430, trial="tp2"),
    ]
    assert examine(judge_parity(old, "zero3"), "zero3") == []


SLOW_START = seconds(4.0, 3.0, *[2.0] * 8)
WIDE = seconds(2.0, 2.6, 1.9, 2.5, 2.0, 2.4, 2.1, 2.6, 1.9, 2.3)
ERRATIC = seconds(2.0, 3.6, 1.9, 3.5, 2.0, 3.4, 2.1, 3.6, 1.9, 3.3)
TP_ACROSS = [Group(kind="tp", ranks=[0, 1, 2, 3], link="efa", transport="NET/Libfabric/GDRDMA")]
SMALL: dict[str, Any] = {"num_parameters": 100_000_000}
CPU_LAYOUT = LayoutSizes(tp=1, cp=1, pp=8, vp=1, dp=1)

# what is changed in the trial tp4-pp2, and what the one finding must say: kind, evidence, change
FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "warm-up inside the timing": (
        {"step_seconds": SLOW_START, "warmup_steps": 1},
        (
            "untrustworthy",
            "warm-up",
            "first 2 timed steps took up to 4 s, the median of the later half is 2 s",
            "larger warmup_steps",
        ),
    ),
    "too few steps": (
        {"step_seconds": seconds(2.0), "speeds": (9100.0,)},
        ("preliminary", "too few timed steps to determine", "1 timed step", "steps: 15"),
    ),
    "too few steps for the spread": (
        {"step_seconds": WIDE},
        ("preliminary", "too few timed steps for the large variation", "took 1.9 to 2.6 s", "more steps"),
    ),
    "steps that vary beyond use": (
        {"step_seconds": ERRATIC},
        ("untrustworthy", "too few timed steps for the large variation", "the median is ±19.1%", "more steps"),
    ),
    "repeats disagree": (
        {"speeds": (9100.0, 9900.0, 9200.0)},
        (
            "preliminary",
            "repeated runs of the trial disagree",
            "9,100 to 9,900 tok/s per device over 3 runs, a difference of 9%",
            "throttled",
        ),
    ),
    "repeats far apart": (
        {"speeds": (19100.0, 24200.0, 19200.0)},
        ("untrustworthy", "repeated runs of the trial disagree", "a difference of 27%", "throttled"),
    ),
    "old cuDNN": (
        {"kernels": KERNELS | {"attention": "torch scaled_dot_product_attention: FlashAttention-2"}},
        ("slow", "half as fast as cuDNN's attention on NVIDIA H200", "FlashAttention-2", "cuDNN 9.15.1 or newer"),
    ),
    "chunks of context parallelism": (
        {"kernels": KERNELS | {"attention": "…: FlashAttention-2, of a chunk's queries and all keys before"}},
        ("slow", "half as fast as cuDNN's attention", "a chunk's queries", "a cp that divides the KV heads"),
    ),
    "plain kernels": (
        PLAIN,
        ("untrustworthy", "plain (unfused) kernels", "cross_entropy: torch, fp32 logits", "kernels: auto"),
    ),
    "plain kernels on purpose": (
        PLAIN | {"requested_kernels": "reference"},
        ("note", "kernels: reference", "norm: transformers RMSNorm", "compare this trial only with other trials"),
    ),
    "skipped steps": (
        {"grad_norms": LOSSES + [5.0] * 2 + [None] * 2 + [5.0] * 8, "num_skipped_steps": 2},
        ("untrustworthy", "skipped timed steps", "2 of 10 timed steps skipped", "loss scale"),
    ),
    "other processes": (
        {"machines": [machine("a"), machine("b", num_other_gpu_processes=2, other_gpu_processes_gib=20.5)]},
        ("untrustworthy", "other processes", "b: 2 other processes, using 20.5 GiB", "nvidia-smi"),
    ),
    "throttled": (
        {"machines": [machine(throttle={"too hot (hardware)": 0.4, "power cap": 1.0})]},
        ("untrustworthy", "throttled GPUs", "a: too hot (hardware) in 40% of the samples", "cooling"),
    ),
    "power limit": (
        {"machines": [machine(power_limit_share=0.5)]},
        ("slow", "power limit", "50% of the default slowed the GPU down in 90%", "nvidia-smi -pl"),
    ),
    "sockets where EFA was expected": (
        {"groups": [Group(kind="pp", ranks=[0, 4], link="efa", transport="NET/Socket")]},
        ("slow", "EFA was expected", "the pp group of ranks 0, 4 uses NET/Socket", "vpc.amazonaws.com/efa"),
    ),
    "no EFA device where the instance has EFA": (
        {"groups": [Group(kind="pp", ranks=[0, 4], link="socket", transport="NET/Socket")]},
        ("slow", "EFA was expected", "p5e.48xlarge has EFA", "aws-ofi-nccl"),
    ),
    "sockets where InfiniBand was expected": (
        {"groups": [Group(kind="pp", ranks=[0, 4], link="infiniband", transport="NET/Socket")]},
        ("slow", "InfiniBand was expected", "NET/Socket", "NCCL_IB_HCA"),
    ),
    "shared memory where NVLink was expected": (
        {"groups": [Group(kind="tp", ranks=[0, 1, 2, 3], link="nvlink", transport="SHM")]},
        ("slow", "links inside a host", "NCCL uses SHM where nvlink was expected", "one container or pod"),
    ),
    "hosts that NCCL counts": (
        {"placement": PlacementUsed(policy="topology", launcher_ranks=[0], hosts=[], nccl_num_nodes=8)},
        ("slow", "NCCL counts a wrong number of hosts", "NCCL counts 8 hosts, and megabench found 2", "NCCL_HOSTID"),
    ),
    "TP across hosts": (
        {"groups": TP_ACROSS},
        ("slow", "span several hosts", "the tp group of ranks 0–3 communicates over EFA", "placement: topology"),
    ),
    "TP outside NVLink": (
        {"groups": [Group(kind="tp", ranks=[0, 1, 2, 3], link="pcie", transport="P2P/CUMEM")]},
        ("slow", "do not use NVLink", "communicates over PCIe (P2P/CUMEM)", "megabench topo"),
    ),
    "NIC on another switch": (
        {"machines": [machine("a"), machine("b", nic_distance="other bridge")]},
        ("slow", "different PCIe switches", "b: a GPU reaches its nearest NIC only through another host", "topo -m"),
    ),
    "one hardware queue": (
        {"engine": "fsdp", "environment": Environment(versions={}, variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})},
        ("slow", "one hardware queue", "with fsdp", "unset CUDA_DEVICE_MAX_CONNECTIONS"),
    ),
    "small micro-batch": (
        {"seq_length": 512},
        ("slow", "too small to keep a GPU busy", "512 tokens", "micro_batch: auto"),
    ),
    "memory unused": (
        {"peak_memory_gib": PeakMemory(max=5.6, per_rank=[5.6])},
        ("slow", "most of the GPU memory unused", "5.6 of 140 GiB (4%) at micro-batch 1", "micro_batch: auto"),
    ),
    "recomputed for nothing": (
        {
            "options": {"recompute": "full"},
            "peak_memory_gib": PeakMemory(max=40.0, per_rank=[40.0]),
            "micro_batch": 8,
        },
        ("slow", "forward twice", "recompute: full, peak memory 40.0 of 140 GiB (29%): 71% is free", "recompute: auto"),
    ),
    "offloaded for nothing": (
        {"options": {"offload": "all"}},
        ("slow", "keeps model states in host memory", "the model states per GPU are 16.8 GiB", "offload: none"),
    ),
    "bubble": (
        {"layout": CPU_LAYOUT, "micro_batch": 4},
        (
            "slow",
            "too few micro-batches for the number of pipeline stages",
            "8 micro-batches through 8 stages: the pipeline bubble is 47%",
            "vp: 2",
        ),
    ),
    "idle GPUs": (
        {"gpu_utilization": 0.4},
        ("slow", "GPUs are often idle", "40% of the time during the timed steps", "profile: true"),
    ),
    "small shm": (
        {"machines": [machine(shm_total_gib=0.0625)]},
        ("note", "/dev/shm is small", "a: 64 MiB", "--shm-size"),
    ),
    "compile cache": (
        {
            "options": {"compile": True},
            "first_step_seconds": 61.0,
            "machines": [machine(is_compile_cache_kept=False, compile_cache="/tmp/torchinductor_root")],
        },
        (
            "note",
            "the compile cache is not kept",
            "first step took 61 s; the cache directory of a is /tmp/torchinductor_root",
            "TORCHINDUCTOR",
        ),
    ),
    "too close": (
        {"speeds": (8010.0, 8030.0, 8060.0)},
        ("note", "too close", "tp4-pp2 8,030 tok/s per device, zero3: equal within the 95% interval", "repeats"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found_alone(fault):
    changes, words = FAULTS[fault]
    findings = look(zero3(), tp(**changes))
    finding = only(findings)
    kind, what, evidence, change = words
    assert finding.kind == kind and "tp4-pp2" in finding.trials
    assert what in finding.what and evidence in finding.evidence and change in finding.change


def test_fp32_on_gpus_and_unequal_precision():
    changes: dict[str, Any] = {"precision": "fp32", "work_class": work_class(**WORK | {"precision": "fp32"})}
    unequal, slow = look(zero3(), tp(**changes))
    assert (unequal.kind, unequal.trials) == ("untrustworthy", ()) and "differ in precision" in unequal.what
    assert unequal.evidence == "bf16: zero3; fp32: tp4-pp2"
    assert (slow.kind, slow.trials) == (
        "slow",
        ("tp4-pp2",),
    ) and "66.9 TFLOP/s in fp32 and 989.4 TFLOP/s in bf16" in slow.evidence
    both = only(look(zero3(**changes), tp(**changes)))
    assert both.trials == ("zero3", "tp4-pp2") and both.what == "the trial trains in fp32"


def test_a_study_of_precisions_is_no_fault():
    changes: dict[str, Any] = {"precision": "fp32", "work_class": work_class(**WORK | {"precision": "fp32"})}
    full = [run.model_copy(update={"trial": f"{run.trial}-fp32"}) for run in study(zero3(**changes), tp(**changes))]
    assert look(zero3(), tp(), full) == []
    no_zero3 = [run for run in study(tp(), full) if run.engine == "megatron"]
    assert "not ZeRO-3" in only(examine(judge_parity(no_zero3, "tp4-pp2"), "tp4-pp2")).what


def in_fp8(runs: list[RunRecord], **work: object) -> list[RunRecord]:
    fields = WORK | {"precision": "fp8", "fp8": Fp8Work(recipe="tensorwise")} | work
    changes = {"precision": "fp8", "work_class": work_class(**fields)}
    return [run.model_copy(update=changes | {"trial": f"{run.trial}-fp8"}) for run in runs]


def test_fp8_needs_a_bf16_trial_of_the_same_work():
    found = only(look(in_fp8(zero3()), in_fp8(tp()), reference="zero3-fp8"))
    assert (found.kind, found.trials) == ("preliminary", ("zero3-fp8", "tp4-pp2-fp8"))
    assert "the study has no bf16 result of otherwise equal work" in found.what
    assert found.change == "add a trial with precision: bf16 and otherwise equal settings"
    other, missing = sorted(look(zero3(), tp(), in_fp8(tp(), seed=7)), key=lambda finding: finding.kind)
    assert other.evidence == "seed 7 instead of 1234" and missing.trials == ("tp4-pp2-fp8",)


def test_bf16_references_of_fp8_trials_are_no_fault():
    seeds = work_class(**WORK | {"seed": 7, "data_seed": 1234})
    assert look(zero3(), tp(), in_fp8(tp())) == []
    assert look(zero3(), in_fp8(zero3()), in_fp8(tp()), zero3("seed-7", work_class=seeds)) == []
    assert look(zero3(), in_fp8(zero3()), in_fp8(tp()), reference="zero3-fp8") == []


def test_fp32_beside_fp8_and_bf16_is_still_unequal():
    changes = {"precision": "fp32", "work_class": work_class(**WORK | {"precision": "fp32"})}
    unequal, _ = look(zero3(), in_fp8(zero3()), tp(**changes))
    assert unequal.evidence == "bf16: zero3; fp32: tp4-pp2"


def test_a_gpu_without_bf16_is_told_fp16():
    changes = {"precision": "fp32", "device": "Tesla V100-SXM2-32GB"}
    assert "precision: fp16" in only(look(zero3(**changes), tp(**changes))).change


def test_unequal_gradient_dtypes():
    found = only(look(zero3(), tp(grad_dtype="bf16", work_class=work_class(**WORK, grad_dtype="bf16"))))
    assert found.kind == "untrustworthy" and "gradient dtype" in found.what
    assert found.evidence == "fp32: zero3; bf16: tp4-pp2" and "grad_dtype" in found.change


def test_losses_that_stand_still():
    still: dict[str, Any] = {"losses": [9.0, 9.01, 8.99]}
    found = only(look(zero3(**still), tp(**still)))
    assert found.kind == "note" and found.trials == ("zero3",)
    assert found.evidence == "the losses vary by 0.0022 of their mean; the parity tolerance is 0.02"
    moving: dict[str, Any] = {"losses": [9.0, 8.8, 8.7]}
    assert look(zero3(**moving), tp(**moving)) == []


def test_weights_that_are_gathered_twice_across_hosts():
    options = ZERO3_OPTIONS | {"reshard_after_forward": True}
    found = only(look(zero3(options=options), tp()))
    assert found.kind == "note" and found.trials == ("zero3",) and "reshard_after_forward: false" in found.change
    assert look(zero3(options=options), zero3("kept"), tp()) == [], "another keeps them"
    near = PlacementUsed(policy="topology", launcher_ranks=list(range(8)), hosts=[], nccl_num_nodes=1)
    here: dict[str, Any] = {"num_hosts": 1, "placement": near}
    assert look(zero3(options=options, **here), tp(**here)) == []


def test_other_work_than_the_reference():
    found = only(look(zero3(), tp(work_class=work_class(**WORK | {"seq_length": 8192}))))
    assert found.kind == "note" and found.evidence == "seq_length 8192 instead of 4096"
    longer = tp(work_class=work_class(**WORK, schedule={"lr": 3e-4, "steps": 15.0}))
    reference = zero3(work_class=work_class(**WORK, schedule={"lr": 1e-3, "steps": 10.0}))
    assert only(look(reference, longer)).evidence == "lr 0.0003 instead of 0.001, steps 15 instead of 10"
    own = [
        run.model_copy(update={"trial": "long"}) for run in zero3(work_class=work_class(**WORK | {"seq_length": 8192}))
    ]
    assert look(zero3(), tp(work_class=work_class(**WORK | {"seq_length": 8192})), own) == [], "measured by its own"
    compressed = tp(work_class=work_class(**WORK, compression="PowerSGD, rank 4"))
    assert look(zero3(), compressed) == []


def test_a_baseline_that_was_not_tuned():
    probes = [Probe(micro_batch=1, recompute="none", global_batch=8, status="ok", step_seconds=1.0)]
    found = only(look(zero3(micro_batch=1), tp(probes=probes)))
    assert found.kind == "untrustworthy" and "fixed micro-batch of 1" in found.what
    assert found.evidence == "tp4-pp2: tuned micro-batch"
    assert "larger micro-batch" in only(look(zero3(micro_batch=1), tp(micro_batch=8))).evidence
    assert look(zero3(micro_batch=1), tp(micro_batch=4)) == [], "TP4 splits the activations of a micro-batch by four"
    assert look(zero3(micro_batch=1), tp()) == [], "all alike"
    full: dict[str, Any] = {"peak_memory_gib": PeakMemory(max=135.0, per_rank=[135.0])}
    assert look(zero3(micro_batch=1, **full), tp(micro_batch=8)) == [], "no more would fit"
    other = tp(probes=probes, work_class=work_class(**WORK, compression="PowerSGD, rank 4"))
    assert look(zero3(micro_batch=1), other) == [], "other work has no speedup over the reference"


def test_a_baseline_without_the_sweep_of_the_others():
    """A sweep with a larger micro-batch than that of the reference tunes the other trials."""
    sweep = [named(tp(micro_batch=size), f"tp-{size}") for size in (4, 16)]
    found = [finding for finding in look(zero3(), *sweep) if finding.kind == "untrustworthy"]
    assert "fixed micro-batch of 2 while other trials have a tuned one" in only(found).what
    assert only(found).evidence == "tp-16: tuned micro-batch"
    swept = look(zero3(), named(zero3(micro_batch=1), "zero3-1"), *sweep)
    assert not [finding for finding in swept if finding.kind == "untrustworthy"], "its own sweep tried another"


def test_a_sweep_over_micro_batches_is_no_fault():
    ddp = {"engine": "ddp", "options": {"compile": False}, "layout": ZERO3["layout"], "groups": DP}
    sweep = [named(tp(micro_batch=size, speeds=(6000.0 + 600 * size,) * 3, **ddp), f"ddp-{size}") for size in (1, 2, 4)]
    findings = look(*sweep, zero3(micro_batch=4), reference="ddp-1")
    assert [finding.kind for finding in findings] == ["note"] and "not ZeRO-3" in findings[0].what
    small = [named(zero3(micro_batch=size, speeds=(8000.0 + 500 * size,) * 3), f"zero3-{size}") for size in (1, 2)]
    faster = only(look(*small, tp(), reference="zero3-1"))
    assert faster.kind == "note" and faster.change == "reference: zero3-2"


def test_a_sweep_over_precisions_is_no_fault():
    """The sweep of one layout shows the effect of the precision; the other layouts need no fp32 trial."""
    changes = {"precision": "fp32", "work_class": work_class(**WORK | {"precision": "fp32"}), "micro_batch": 2}
    assert look(zero3(), tp(), named(tp(**changes), "tp-fp32")) == []
    unequal, slow = look(zero3(), tp(), named(tp(**changes, options={"compile": True}), "compiled-fp32"))
    assert unequal.evidence == "bf16: zero3, tp4-pp2; fp32: compiled-fp32" and slow.kind == "slow"


def named(runs: list[RunRecord], trial: str) -> list[RunRecord]:
    return [run.model_copy(update={"trial": trial}) for run in runs]


def test_one_slow_step_among_steps_that_vary_is_no_warm_up():
    varying = seconds(2.5, 2.0, 1.9, 2.5, 2.0, 2.4, 2.1, 2.3, 1.9, 2.2)
    assert "variation" in only(look(zero3(), tp(step_seconds=varying))).what


def test_timings_on_cpus_have_no_findings():
    """They say nothing about GPUs; whether the losses agree does not depend on the device."""
    cpu = {"device": "cpu", "device_memory_gib": None, "precision": "fp32"}
    once = tp(**cpu, step_seconds=ERRATIC, warmup_steps=0, speeds=(8000.0,))
    assert look(zero3(**cpu), once, named(tp(**cpu, speeds=(9000.0, 14000.0)), "far")) == []
    wrong = named(tp(**cpu, losses=[9.0, 9.0, 9.0]), "wrong")
    assert only(look(zero3(**cpu), once, wrong)).kind == "untrustworthy"


def test_speeds_that_are_equal_without_repeats_are_preliminary():
    close = {"speeds": (8010.0, 8060.0)}
    assert only(look(zero3(), tp(**close))).kind == "preliminary"
    led = only(look(zero3(speeds=(8000.0,)), tp(speeds=(8125.0,))))
    assert led.kind == "preliminary" and "tp4-pp2 is 1.6% faster than zero3" in led.evidence


def test_running_out_of_memory_is_a_result():
    big = {"micro_batch": 4, "options": {"recompute": "full"}}
    text = "OutOfMemoryError: CUDA out of memory. 1.4 GiB is free. Including non-PyTorch memory, this process has 138"
    found = only(look(zero3(), tp(), lost("big", "oom", text, **big)))
    assert found.kind == "note" and found.evidence.endswith("1.4 GiB is free.")
    alone = look(zero3(), tp(**big | {"micro_batch": 8}), lost("big", "oom", text, **big))
    assert "ran out of memory" in only(alone).what, "a larger micro-batch shows nothing"
    assert look(zero3(), tp(**big | {"micro_batch": 2}), lost("big", "oom", text, **big)) == [], "the sweep shows it"


def test_a_reference_that_is_not_the_best_zero3():
    faster = zero3(
        "zero3-more", speeds=(8600.0, 8620.0, 8640.0), micro_batch=2, options=ZERO3_OPTIONS | {"hpz_size": 4}
    )
    found = only(look(zero3(), faster, tp()))
    assert found.kind == "untrustworthy" and found.change == "reference: zero3-more"


def test_a_reference_on_a_slow_network_is_not_compared_with_trials_on_a_fast_one():
    faster: dict[str, Any] = {"speeds": (9000.0, 9010.0, 9020.0), "num_hosts": 2, "emulated_hosts": 2}
    fast, slow = (EmulatedNetworkUsed(gb_per_s=rate, latency_us=0) for rate in (3.0, 1.0))
    limited: dict[str, Any] = {"num_hosts": 2, "emulated_hosts": 2, "emulated_network": slow}

    def whats(**of_other: Any) -> list[str]:
        found = look(tp(), zero3(**limited), zero3("other", **faster, **of_other))
        return [finding.what for finding in found if "not the fastest ZeRO-3" in finding.what]

    assert whats(emulated_network=slow) and not whats(emulated_network=fast) and not whats()


def test_liger_that_is_not_installed():
    plain: dict[str, Any] = PLAIN | {"environment": Environment(versions={"torch": "2.11.0"}, variables={})}
    found = only(look(zero3(**plain), tp(**plain)))
    assert found.kind == "slow" and found.change == "pip install liger-kernel"
    meant: dict[str, Any] = plain | {"requested_kernels": "reference"}
    assert look(zero3(**meant), tp(**meant)) == []


def test_variables_of_the_shell():
    blocking: dict[str, Any] = {"environment": Environment(versions={}, variables={"CUDA_LAUNCH_BLOCKING": "1"})}
    found = only(look(zero3(**blocking), tp(**blocking)))
    assert (
        found.kind == "slow" and found.trials == ("zero3", "tp4-pp2") and found.change == "unset CUDA_LAUNCH_BLOCKING"
    )
    p2p = {"environment": Environment(versions={}, variables={"NCCL_P2P_DISABLE": "1"})}
    assert look(zero3(), tp(**p2p)) == [], "a trial that sets it means it"


def test_tp_across_on_purpose_is_silent():
    placement = PlacementUsed(policy="spread-tp", launcher_ranks=[0], hosts=[], nccl_num_nodes=2)
    assert look(zero3(), tp(groups=TP_ACROSS, placement=placement)) == []


def test_a_larger_micro_batch_that_is_tried_is_not_advised():
    little = {"peak_memory_gib": PeakMemory(max=30.0, per_rank=[30.0])}
    more = [run.model_copy(update={"trial": "more", "micro_batch": 2}) for run in tp(speeds=(8500.0, 8510.0))]
    assert look(zero3(), tp(**little), more) == []


def test_one_run_each_and_a_reference_that_is_not_zero3():
    once = look(zero3()[:1], tp()[:1])
    assert only(once).kind == "note" and "2 trials, one run each" in once[0].evidence
    other = only(look(zero3(), tp(micro_batch=2), reference="tp4-pp2"))
    assert other.kind == "note" and "not ZeRO-3" in other.what


OOM, HANG = (
    "rank 1 ran out of memory: CUDA out of memory",
    "no result after 20 s (timeout_seconds): rank 3 in train (x.py:1), 2 of 9 steps done",
)
STALL = "no progress for 300 s: rank 5 (b) is in recv (x.py:1) after step 2 of 9, and the others wait"


def test_trials_without_a_result_are_named():
    wrong = tp(losses=[9.0, 9.0, 9.0], speeds=(9900.0,))
    findings = look(
        zero3(),
        [run.model_copy(update={"trial": "wrong"}) for run in wrong],
        lost("big", "oom", OOM, micro_batch=4, options={"recompute": "selective"}),
        lost("hung", "timeout", HANG, failure=RunFailure(kind="hang", rank=3)),
        lost("stuck", "failed", STALL, failure=RunFailure(kind="hang", rank=5)),
        lost("broken", "failed", "rank 2 failed: ValueError: no", failure=RunFailure(kind="error", rank=2)),
        tp(),
    )
    assert [finding.kind for finding in findings] == ["untrustworthy", *["preliminary"] * 3, "note"]
    by_trial = {finding.trials: finding for finding in findings}
    assert list(by_trial) == [("wrong",), ("broken",), ("hung",), ("stuck",), ("big",)]
    assert by_trial["wrong",].change.startswith("do not use the speed of this trial")
    assert "its losses differ from those of zero3" in by_trial["wrong",].evidence
    assert by_trial["big",].evidence == OOM
    assert by_trial["big",].change.startswith("micro_batch below 4") and "larger tp" in by_trial["big",].change
    assert "rank 3" in by_trial["hung",].what and "rank-3.log" in by_trial["hung",].change
    assert "rank 5" in by_trial["stuck",].what and "rank-2.log" in by_trial["broken",].change


@pytest.mark.parametrize(("changes", "words"), cases("OUT_OF_MEMORY").values(), ids=str)
def test_what_to_do_when_memory_runs_out(changes, words):
    found = only(look(zero3(), tp(), lost("big", "oom", OOM, **changes)))
    assert words in found.change and ("recompute: full" in found.change) == ("recompute" not in changes["options"])


def test_shared_memory_and_the_killer_have_words_of_their_own():
    bus, killed = look(
        zero3(),
        lost("bus", "failed", "signal 7 (SIGBUS)", failure=RunFailure(kind="shared-memory", rank=1)),
        lost("killed", "failed", "signal 9 (SIGKILL)", failure=RunFailure(kind="killed", rank=1)),
        tp(),
    )
    assert "--shm-size" in bus.change and "dmesg" in killed.change
    assert bus.what.endswith("out of shared memory") and killed.what.endswith("was killed")


def test_remedies_that_differ_are_shown_for_each_trial():
    few = {"step_seconds": seconds(2.0), "speeds": (9100.0,)}
    found = only(look(zero3(), tp(**few), named(tp(**few, warmup_steps=2), "short")))
    assert found.trials == ("tp4-pp2", "short") and found.evidence == "1 timed step"
    assert found.change == "tp4-pp2: set steps: 15 or more; short: set steps: 12 or more"


@pytest.mark.parametrize(
    ("status", "failure", "what", "change"),
    [
        ("failed", RunFailure(kind="hang", rank=0), "ranks waited for rank 0", "rank-0.log"),
        ("timeout", RunFailure(kind="hang", rank=3), "ranks waited for rank 3", "rank-3.log"),
        ("timeout", RunFailure(kind="hang"), "ranks waited for an unidentified rank", "rank-*.log"),
        ("failed", RunFailure(kind="shared-memory", rank=1), "failed and has no result", "--shm-size"),
        ("failed", RunFailure(kind="killed", rank=1), "failed and has no result", "dmesg"),
        ("failed", RunFailure(kind="error", rank=0), "failed and has no result", "rank-0.log"),
        ("failed", None, "failed and has no result", "rank-*.log"),
        ("oom", RunFailure(kind="oom", rank=1), "ran out of memory", "micro_batch below"),
    ],
)
@pytest.mark.parametrize("error", ["reworded", "SIGKILL: rank 7 made no progress for 9 s in /dev/shm", None])
def test_the_cause_is_found_whatever_the_words(status, failure, what, change, error):
    options = {"recompute": "selective"}
    found = only(look(zero3(), tp(), lost("bad", status, error, failure=failure, micro_batch=2, options=options)))
    assert found.trials == ("bad",) and what in found.what and change in found.change
    assert error is None or found.evidence == error


def test_kernels_and_settings_are_found_whatever_the_words():
    other = {"attention": "a", "norm": "b", "activation": "c", "cross_entropy": "d"}
    plain = {"kernels": other, "kernel_traits": FUSED | {"fused_loss": False}}
    found = only(look(zero3(kernels=other), tp(**plain)))
    assert found.kind == "untrustworthy" and found.evidence == "cross_entropy: d"
    meant = only(look(zero3(kernels=other), tp(**plain, requested_kernels="reference")))
    assert meant.kind == "note"
    auto: dict[str, Any] = {"auto_settings": ["micro_batch"]}
    assert look(zero3(**auto), tp(seq_length=512, **auto)) == []


def test_a_lost_reference_comes_first():
    first, second = look(lost("zero3", "oom", OOM, **ZERO3, options=ZERO3_OPTIONS), tp())
    assert "the reference zero3 has no valid result" in first.what
    assert first.evidence == "the reference trial ended with status oom"
    assert second.trials == ("zero3",)
    assert "has no record" in look(tp(), zero3("other"), reference="zero3")[0].evidence


def test_the_same_fault_of_several_trials_is_one_finding():
    idle: dict[str, Any] = {"gpu_utilization": 0.4}
    found = only(look(zero3(**idle), tp(**idle | {"gpu_utilization": 0.5})))
    assert found.trials == ("zero3", "tp4-pp2")
    assert found.evidence == (
        "zero3: a kernel ran 40% of the time during the timed steps; "
        "tp4-pp2: a kernel ran 50% of the time during the timed steps"
    )


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("engines-bf16", ["preliminary", "slow", "note", "note"]),
        ("llama3-8b-two-gpus", ["preliminary", "preliminary", "note"]),
        ("llama3-8b-two-gpus-synthetic", ["preliminary", "preliminary", "slow", "note", "note", "note", "note"]),
        ("llama3-8b-first-look", ["untrustworthy", "note", "note"]),
        ("nccl-parity-bf16", ["untrustworthy", "note", "note"]),
        ("placement-two-hosts", ["note", "note", "note"]),
        ("qwen3-0.6b-dp", ["preliminary", "preliminary", "note"]),
        ("gpt2-zero", ["preliminary", "preliminary", "slow", "note"]),
        ("bloom-7b1-scale", ["note"]),
        ("llama3-8b-nvlink", ["note"]),
        ("llama3-8b-fp8", ["preliminary", "note"]),
    ],
)
def test_measured_studies(measured, name, kinds):
    findings = findings_at(measured[name])
    assert [finding.kind for finding in findings] == kinds, findings


def test_measured_studies_in_words(measured):
    close, unused, kernels, once = findings_at(measured["engines-bf16"])
    assert unused.trials == ("pp2",) and "of 140 GiB" in unused.evidence
    assert kernels.trials == ("zero3-reference", "dp2-reference", "tp2-reference")
    assert close.trials == ("dp2", "fsdp-kept", "zero3-leaf", "fsdp") and close.evidence.endswith(
        "fsdp-kept, zero3-leaf, fsdp: equal within their spread"
    )
    assert "one run each" in once.evidence
    *_, twice, still, _ = findings_at(measured["llama3-8b-two-gpus-synthetic"])
    assert twice.trials == ("zero3-two-hosts", "zero3-leaf-two-hosts")
    assert still.trials == ("zero3-leaf",) and still.evidence.startswith("the losses vary by 0.0")
    _, parts, _ = findings_at(measured["nccl-parity-bf16"])
    assert parts.trials == ("zero3",) and "zero_leaf_layers: true" in parts.change


BASE = "base: {model: llama3-8b, steps: 20, warmup_steps: 5, seq_length: 4096, micro_batch: auto}\nrepeats: 3\n"
PLANS = {
    "good": ("{ZERO3}, {tp: 2}, {tp: 8, pp: 2}", "", None),
    "fp8": ("{ZERO3, precision: fp8}, {tp: 8, precision: fp8}", "", "no bf16 result of otherwise equal work"),
    "fp8-and-bf16": ("{ZERO3}, {tp: 2}, {name: fp8, tp: 2, precision: fp8}", "", None),
    "unequal": ("{ZERO3}, {tp: 8, grad_dtype: bf16}", "", "gradient dtype"),
    "few": ("{ZERO3, steps: 6}, {tp: 8}", "", "too few planned timed steps"),
    "reference": ("{ZERO3}, {name: tp, tp: 8}", "reference: tp", "not ZeRO-3"),
    "baseline": ("{ZERO3, micro_batch: 1}, {tp: 8}", "", "fixed micro-batch of 1"),
    "by parts": ("{name: zero3, engine: deepspeed, KEPT}, {tp: 8}", "", "no ZeRO-3 trial gathers whole layers"),
    "twice": (
        "{name: zero3, engine: deepspeed, zero_leaf_layers: true}, {tp: 8}",
        "",
        "no ZeRO-3 trial keeps them",
    ),
    "warm-up": ("{ZERO3, warmup_steps: 0}, {tp: 8}", "", "no warm-up"),
}


def plan(trials: str) -> str:
    """A study's file; ZERO3 stands for a good baseline."""
    trials = trials.replace("ZERO3", "name: zero3, engine: deepspeed, zero_leaf_layers: true, KEPT")
    trials = trials.replace("KEPT", "reshard_after_forward: false")
    return f"{BASE}trials: [{trials}]\n"


@pytest.mark.parametrize("name", PLANS)
def test_a_planned_study(tmp_path, name):
    trials, more, words = PLANS[name]
    path = tmp_path / "study.yaml"
    path.write_text(plan(trials) + more)
    findings = _of_the_study(findings_at(path, cluster="p5.48xlarge:2"))
    if words is None:
        assert findings == []
    else:
        assert words in only(findings).what


def _of_the_study(findings: list[Finding]) -> list[Finding]:
    """Leave out the findings of predictions, which test_best_plan_rules.py and test_planner_rules.py check."""
    return [finding for finding in findings if not re.search("predicted|may run out", finding.what)]


def test_fp32_is_known_before(tmp_path):
    """The planner also predicts the gain of bf16, in findings of its own."""
    path = tmp_path / "study.yaml"
    path.write_text(plan("{ZERO3, precision: fp32}, {tp: 8, precision: fp32}"))
    findings = findings_at(path, cluster="p5.48xlarge:2")
    assert "trains in fp32" in only(_of_the_study(findings)).what
    assert any("bf16 is predicted to be faster than fp32" in finding.what for finding in findings)


def test_tensor_parallelism_beyond_a_host_is_known_before(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(plan("{ZERO3}, {tp: 8}"))
    found = only(_of_the_study(findings_at(path, cluster="g6e.48xlarge:2")))
    assert "do not use NVLink" in found.what and "communicates over PCIe" in found.evidence
    path.write_text(plan("{ZERO3}, {name: a, tp: 8}").replace("repeats: 3", "repeats: 1"))
    note = only(_of_the_study(findings_at(path, cluster="p5.48xlarge:2")))
    assert note.kind == "note" and "ran only once" in note.what
    halves = tmp_path / "halves.yaml"
    halves.write_text("hosts: [{count: 2, gpu: NVIDIA H200, num_gpus: 4, network: efa}]")
    path.write_text(plan("{ZERO3}, {tp: 8}"))
    found = only(_of_the_study(findings_at(path, cluster=str(halves))))
    assert "span several hosts" in found.what and "ranks 0–7 communicates over EFA" in found.evidence


def shown(findings: list[Finding], as_json: bool = False) -> str:
    written = io.StringIO()
    console = Console(file=written, width=60)
    write(console, findings, as_json)
    return written.getvalue()


def test_what_is_printed(tmp_path):
    assert shown([]) == WELL + "\n"
    text = shown(look(zero3(), tp(gpu_utilization=0.4)))
    lines = text.splitlines()
    assert len(lines) == 3 and lines[0].startswith("slow  tp4-pp2: the GPUs are often idle")
    assert lines[1].startswith("  evidence: ") and lines[2].startswith("  change:   ")


def test_the_head_of_a_table_names_the_worst(tmp_path):
    written = io.StringIO()
    console = Console(file=written, width=60)
    good = judge_parity(study(zero3(), tp()), "zero3")
    write_head(console, good, "zero3", tmp_path)
    assert written.getvalue() == ""
    bad = study(zero3(gpu_utilization=0.4), tp(seq_length=512), lost("big", "failed", "rank 0 failed"))
    write_head(console, judge_parity(bad, "zero3"), "zero3", tmp_path)
    lines = written.getvalue().splitlines()
    assert lines[0] == f"doctor: 3 findings. Run megabench doctor {tmp_path} for details." and len(lines) == 3
    assert lines[1] == "  preliminary: big: the trial failed and has no result"


def doctor(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megabench", "doctor", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_the_command(tmp_path):
    write_records(tmp_path / "results.jsonl", study(zero3(), tp(gpu_utilization=0.4)))
    ended = doctor(tmp_path, "--json")
    (found,) = json.loads(ended.stdout)
    assert ended.returncode == 0 and list(found) == ["kind", "trials", "what", "evidence", "change"]
    plan = doctor("configs/studies/quickstart.yaml")
    assert (plan.returncode, plan.stdout) == (0, WELL + "\n")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none", "does not exist"),
        ("empty", "contains no results.jsonl"),
        ("broken", "results.jsonl, line 1 is not JSON"),
        ("text.txt", "is not a study file"),
        ("bad.yaml", "unknown setting"),
    ],
)
def test_a_bad_path_is_one_sentence_and_2(tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/results.jsonl").write_text("{no")
    (tmp_path / "text.txt").touch()
    (tmp_path / "bad.yaml").write_text("base: {world_size: 2}\ntrials: [{tpp: 2}]")
    ended = doctor(tmp_path / name)
    assert (ended.returncode, ended.stdout) == (2, "") and ended.stderr.startswith("Error: ")
    assert words in ended.stderr and ended.stderr.count("\n") == 1


def test_a_single_run_is_read_as_well(tmp_path):
    tp(gpu_utilization=0.4)[0].write(tmp_path / "record.json")
    assert only(findings_at(tmp_path)).trials == ("tp4-pp2",)


def test_the_doctor_loads_no_torch():
    code = "import sys, megabench.doctor.write_findings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_every_measured_record_is_read(measured):
    """Among them those of before machines were recorded."""
    records = {name: read_records(folder / "results.jsonl") for name, folder in measured.items()}
    assert all(records.values()) and {"llama3-8b-eight", "engines-4-gpus"} <= records.keys()
    assert all(record.machines == [] for record in records["llama3-8b-first-look"])
