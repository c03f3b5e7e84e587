"""Studies as a cluster would leave them, for tests of the report."""

import math
from dataclasses import replace
from typing import Any

from megabench.doctor import Finding
from megabench.parallel.layout import Layout, rank_groups
from megabench.record import (
    Communication,
    EmulatedNetworkUsed,
    Environment,
    Fp8Work,
    Group,
    HostRanks,
    LayoutSizes,
    PeakMemory,
    PlacementUsed,
    Probe,
    RunRecord,
    StepProfile,
    StepSeconds,
)
from megabench.study.parity import judge_parity
from megabench.study.results_directory import StudyRecords
from tests.study.records import make_record, work_class

QUESTION = "Which layout of two H200 nodes trains Llama-3-8B fastest?"
GPU_CLASS = work_class(model="llama3-8b", num_layers=32, precision="bf16", global_batch=64, seq_length=4096)

SEED_2 = {"seed": 2, "data_seed": GPU_CLASS.seed}  # other initial weights and the same order of the data

FINDINGS = [
    Finding("untrustworthy", ("tp8",), "steps vary by 30 %", "p90 is 1.3 × the median", "run on an idle machine"),
    Finding("slow", (), "sockets between the hosts", "NET/Socket <in> NCCL's log", "install the EFA driver"),
    Finding("note", ("zero3",), "micro-batch 1 leaves GPUs idle", "utilisation 61 %", "set micro_batch: auto"),
]


def losses(shift: float = 0.0, num_steps: int = 20) -> list[float]:
    return [12.0 * math.exp(-0.05 * step) * (1 + shift * 1e-5 * math.sin(step)) for step in range(num_steps)]


def gpu_record(trial: str, speed: float, layout: Layout, repeat: int = 0, num_hosts: int = 2, **changes) -> RunRecord:
    """A record of Llama-3-8B on `num_hosts` hosts of H200s at `speed` tokens/s per GPU."""
    size = layout.world_size
    seconds = 64 * 4096 / (speed * size)
    per_host = size // num_hosts
    hosts = [HostRanks(name=f"node-{n}", ranks=list(range(n * per_host, (n + 1) * per_host))) for n in range(num_hosts)]
    groups = [
        Group(kind=axis, ranks=ranks, link="nvlink" if max(ranks) - min(ranks) < per_host else "efa", transport="P2P")
        for axis, found in rank_groups(layout).items()
        for ranks in found
        if len(ranks) > 1
    ]
    steps = [seconds * (1 + 0.004 * math.sin(7 * step + repeat)) for step in range(15)]
    fields = {
        "trial": trial,
        "repeat": repeat,
        "layout": LayoutSizes(tp=layout.tp, cp=layout.cp, pp=layout.pp, vp=layout.vp, dp=layout.data_parallel),
        "work_class": GPU_CLASS,
        "model": "llama3-8b",
        "num_parameters": 8_030_261_248,
        "seq_length": 4096,
        "global_batch": 64,
        "precision": "bf16",
        "world_size": size,
        "num_hosts": num_hosts,
        "device": "NVIDIA H200",
        "warmup_steps": 5,
        "tokens_per_second": speed * size,
        "step_seconds": StepSeconds(median=seconds, p10=seconds * 0.997, p90=seconds * 1.003, all=steps),
        "mfu": speed / 20_000,
        "peak_tflops": 989.4,
        "peak_memory_gib": PeakMemory(max=60, per_rank=[60 - 20 * rank / size for rank in range(size)]),
        "device_memory_gib": 139.8,
        "kernels": {"attention": "flash", "norm": "fused" if layout.tp > 1 else "Liger"},
        "placement": PlacementUsed(policy="topology", launcher_ranks=list(range(size)), hosts=hosts),
        "groups": groups,
        "wire_bytes": {"dp": 3.2e9 if layout.tp > 1 else 48e9},
        "environment": Environment(
            versions={"torch": "2.13.0", "megabench": "0.1.0"},
            variables={"NCCL_DEBUG": "INFO"} | ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if layout.tp > 1 else {}),
        ),
        "command": f"torchrun --nproc-per-node {size} launch/pretrain.py --tp {layout.tp} --pp {layout.pp}",
    }
    return make_record(losses(len(trial) + repeat), speed, **fields | changes)


def zero3(speed: float = 6000, size: int = 16, **changes) -> RunRecord:
    fields = {"trial": "zero3", "engine": "deepspeed", "options": {"zero_stage": 3, "recompute": "none"}}
    return gpu_record(speed=speed, layout=Layout().with_world_size(size), **fields | changes)


def lost(record: RunRecord, status: str, error: str) -> RunRecord:
    """The same trial without a result."""
    unknown = ("work_class", "step_seconds", "tokens_per_second", "tokens_per_second_per_device", "mfu", "kernels",
               "peak_memory_gib", "model_tflops_per_device", "placement", "wire_bytes", "environment")  # fmt: skip
    empty = {"losses": [], "groups": [], "status": status, "error": error}
    return record.model_copy(update=dict.fromkeys(unknown) | empty)


def on(tp: int = 1, pp: int = 1, vp: int = 1, cp: int = 1, size: int = 16) -> Layout:
    return Layout(tp=tp, pp=pp, vp=vp, cp=cp).with_world_size(size)


def study(records: list[RunRecord], name: str = "two-nodes", reference: str = "zero3") -> StudyRecords:
    return StudyRecords(name, QUESTION, reference, tuple(judge_parity(records, reference)))


def normal() -> StudyRecords:
    """Six trials of three runs each."""
    speeds = {"tp8-pp2": (9000, on(8, 2)), "tp4-pp4": (8600, on(4, 4)), "tp8-dp2": (8000, on(8)),
              "tp4-pp2-vp2": (7400, on(4, 2, 2)), "tp2-cp2-pp4": (5200, on(2, 4, 1, 2))}  # fmt: skip
    records = [zero3(6000 + 40 * n, repeat=n) for n in range(3)]
    for trial, (speed, layout) in speeds.items():
        records += [gpu_record(trial, speed + 50 * n, layout, n) for n in range(3)]
    return study(records)


def zero3_wins() -> StudyRecords:
    return study([zero3(8000), gpu_record("tp8-pp2", 7000, on(8, 2)), gpu_record("tp8", 6500, on(8))])


def tie() -> StudyRecords:
    return study([zero3(6000), gpu_record("tp8-pp2", 7000, on(8, 2)), gpu_record("tp8", 6995, on(8))])


def faults() -> StudyRecords:
    wrong = gpu_record("tp4-lr", 9900, on(4))
    hung = "no progress for 60 s; rank 3 is in all_reduce (engine.py:88)"
    return study([
        zero3(),
        gpu_record("tp8", 8000, on(8)),
        lost(gpu_record("dp16", 0.1, on()), "oom", "rank 1 ran out of memory after step 2 of 20: CUDA out of memory"),
        wrong.model_copy(update={"losses": [loss * 1.3 for loss in wrong.losses]}),
        lost(gpu_record("pp4-hung", 0.1, on(1, 4)), "timeout", hung),
    ])  # fmt: skip


def two_classes() -> StudyRecords:
    other: dict[str, Any] = {"work_class": GPU_CLASS.model_copy(update={"global_batch": 256}), "global_batch": 256}
    records = [zero3(), gpu_record("tp8", 8000, on(8)), zero3(7000, trial="zero3-256", **other)]
    fast = gpu_record("tp8-256", 7700, on(8), **other)
    broken = gpu_record("broken", 1.0, on(2), global_batch=512)
    broken = lost(broken, "failed", "rank 0 was killed by signal 9 (SIGKILL)")
    return study([*records, fast, broken])


def sizes() -> StudyRecords:
    records = [zero3(6600 - 60 * size, size, num_hosts=size // 4, trial=f"zero3-{size}") for size in (4, 8, 16)]
    records += [
        gpu_record(f"tp4-{size}", 9000 - 90 * size, on(4, size=size), num_hosts=size // 4) for size in (4, 8, 16)
    ]
    return study(records, reference="zero3-16")


def profiled() -> StudyRecords:
    def profile(seconds: dict[str, float]) -> StepProfile:
        waits = {part.removeprefix("exposed "): s for part, s in seconds.items() if part.startswith("exposed ")}
        communication = {axes: Communication(seconds=2 * s, exposed_seconds=s) for axes, s in waits.items()}
        return StepProfile(step_seconds=sum(seconds.values()), seconds=seconds, communication=communication)

    tp = {"matrix products": 1.1, "attention": 0.3, "optimizer": 0.1, "other compute": 0.2, "exposed tp": 0.1,
          "exposed pp": 0.15, "idle": 0.04}  # fmt: skip
    zero = {"matrix products": 1.1, "attention": 0.3, "optimizer": 0.1, "other compute": 0.3, "exposed dp": 1.0}
    probes = [
        Probe(micro_batch=1, recompute="none", global_batch=16, status="ok", step_seconds=0.9, peak_memory_gib=40),
        Probe(micro_batch=4, recompute="none", global_batch=16, status="oom", error="CUDA out of memory"),
    ]
    return study([
        zero3(profile=profile(zero | {"idle": 0.1}), probes=probes),
        gpu_record("tp8-pp2", 9000, on(8, 2), profile=profile(tp), probes=probes),
    ])  # fmt: skip


def many_waits() -> StudyRecords:
    """A step of eight kinds of waiting, and parts too short to be seen."""
    waits = ("a group", "cp", "dp", "dp·cp", "pp", "tp", "tp·cp", "tp·pp")
    seconds = {"matrix products": 1.0, "copies": 0.001, "exposed tp·dp": 0.0} | {f"exposed {w}": 0.1 for w in waits}
    profile = StepProfile(step_seconds=sum(seconds.values()), seconds=seconds, communication={})
    return study([zero3(), gpu_record("tp8-pp2", 9000, on(8, 2), profile=profile)])


def cut() -> StudyRecords:
    """Four of the model's 32 layers."""
    few: dict[str, Any] = {"work_class": GPU_CLASS.model_copy(update={"num_layers": 4})}
    return study([zero3(**few), gpu_record("tp8", 8000, on(8), **few)])


def long_names() -> StudyRecords:
    name = "tp4-pp2-vp2-recompute_selective-global_batch256-placement_spread-tp-and-more-of-it"
    records = [zero3(), gpu_record(name, 7000, on(4, 2, 2), warnings=["tp group of ranks 0–3: " + "x" * 120])]
    records += [gpu_record(f"{name}-{n}", 6900 - 100 * n, on(4, 2, 2)) for n in range(12)]
    bad = "rank 1 failed: RuntimeError: " + "/a/very/long/path" * 30
    return study([*records, lost(gpu_record(f"{name}-lost", 1, on(2)), "failed", bad)])


def in_fp8(record: RunRecord, factor: float = 1.0, **work) -> RunRecord:
    """The same trial in fp8."""
    fields = {"precision": "fp8", "fp8": Fp8Work(recipe="tensorwise")} | work
    changes = {"trial": f"{record.trial}-fp8", "precision": "fp8", "work_class": GPU_CLASS.model_copy(update=fields)}
    return record.model_copy(update=changes | {"losses": [loss * factor for loss in record.losses]})


def fp8_layouts() -> StudyRecords:
    """Two layouts in both precisions, for 20 steps."""
    fp8 = [in_fp8(zero3(7400), 1.002), in_fp8(gpu_record("tp8-pp2", 12000, on(8, 2)), 1.002)]
    return study([zero3(), gpu_record("tp8-pp2", 9000, on(8, 2)), *fp8])


def fp8_losses() -> StudyRecords:
    """One layout for 400 steps: three seeds in bf16 and one in fp8."""
    curve = [0.45 + loss for loss in losses(num_steps=400)]
    records = [
        gpu_record(f"seed-{seed}", 9000, on(8), work_class=GPU_CLASS.model_copy(update=work)).model_copy(
            update={"losses": [loss * factor for loss in curve]}
        )
        for seed, factor, work in ((1, 1.0, {}), (2, 0.99, SEED_2), (3, 1.015, SEED_2 | {"seed": 3}))
    ]
    fp8 = in_fp8(gpu_record("seed-1", 12000, on(8)).model_copy(update={"losses": curve}), 1.03)
    return study([*records, fp8], reference="seed-1")


def alone() -> StudyRecords:
    return study([gpu_record("tp8", 8000, on(8)).model_copy(update={"trial_id": "a"})], reference="tp8")


def all_failed() -> StudyRecords:
    records = [
        lost(zero3(), "oom", "rank 0 ran out of memory at the start"),
        lost(gpu_record("tp8", 1, on(8)), "failed", "no GPU"),
    ]
    return study(records)


def on_cpu() -> StudyRecords:
    records = [make_record(losses(), 900, trial="zero3", engine="deepspeed", options={"zero_stage": 3})]
    return study([*records, make_record(losses(1), 1300, trial="tp2")], "quickstart")


def emulated() -> StudyRecords:
    command = "torchrun --nproc-per-node 16 launch/pretrain.py --tp 8 --emulate-hosts 2 --steps 8"
    return study([zero3(emulated_hosts=2), gpu_record("tp8", 8000, on(8), emulated_hosts=2, command=command)])


def crossover() -> StudyRecords:
    """A pipeline, TP and ZeRO-3 with two batches over two networks and NVLink. One of the trials failed."""
    records = []
    for batch in (64, 256):
        batches: dict[str, Any] = {"global_batch": batch}
        batches["work_class"] = GPU_CLASS.model_copy(update=batches)
        for gb_per_s, speeds in ((0.5, (900, 5000, 300)), (2.0, (3000, 6000, 900)), (None, (9000, 8000, 8800))):
            limit = EmulatedNetworkUsed(gb_per_s=gb_per_s, latency_us=0) if gb_per_s else None
            hosts = 2 if limit else 1
            place: dict[str, Any] = {"num_hosts": hosts, "emulated_hosts": limit and hosts, "emulated_network": limit}
            suffix = f"-{batch}-{gb_per_s or 'nvlink'}"
            zero3_speed, pp2_speed, tp2_speed = speeds
            records += [
                zero3(zero3_speed, 2, trial=f"zero3{suffix}", **place, **batches),
                gpu_record(f"pp2{suffix}", pp2_speed, on(pp=2, size=2), **place, **batches),
                gpu_record(f"tp2{suffix}", tp2_speed, on(tp=2, size=2), **place, **batches),
            ]
    records[5] = lost(records[5], "oom", "rank 0 ran out of memory at the start")
    return replace(study(records, "crossover", "zero3-64-nvlink"), answers="crossover")


def yesterday() -> StudyRecords:
    """What `normal` is compared with: another machine, one trial more, one less, and one of other work."""
    device: dict[str, Any] = {"device": "NVIDIA A100-SXM4-80GB"}
    other = {"work_class": GPU_CLASS.model_copy(update={"seed": 7})}
    records = [zero3(3100, **device), gpu_record("tp8-pp2", 4700, on(8, 2), **device)]
    records += [gpu_record("tp8-dp2", 8003, on(8), **device), gpu_record("tp4-pp4", 4000, on(4, 4), **device | other)]
    return study([*records, gpu_record("pp8", 3900, on(1, 8), **device)], "a100")


STUDIES = {f.__name__: f for f in (normal, zero3_wins, tie, faults, two_classes, sizes, profiled, many_waits, cut,
                                   long_names, fp8_layouts, fp8_losses, alone, all_failed, on_cpu,
                                   emulated, crossover)}  # fmt: skip
