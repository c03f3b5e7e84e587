"""Diagnosis rules for GPU runs that are slower than necessary."""

import re
from collections.abc import Iterator

from megabench.doctor.finding import Case, Finding, is_tried_larger, sequences_of_a_replica, variants, was_tuned
from megabench.hardware.gpus import find_gpu
from megabench.precision import POLICIES
from megabench.record import RunRecord
from megabench.specs.registry import ENGINES, ENGINES_AND_PROGRAMS
from megabench.study.summary import layout_name

# Below this fraction of used GPU memory, twice the micro-batch certainly fits.
HALF = 0.5
# Smallest number of rows of a matrix product. With fewer rows, current GPUs wait for launches and memory.
FEWEST_TOKENS = 2048
# Tolerated pipeline bubble, as a fraction of the step time.
MOST_BUBBLE = 0.2
# Smallest normal GPU utilization (NVML: fraction of time with a running kernel). At lower utilization, the GPU waits
# for the CPU or for data.
LEAST_UTILIZATION = 0.8
# Largest fraction of GPU memory for unsharded weights, gradients and optimizer state. Activations need the rest.
SMALL_REPLICA = 0.25
# Usable fraction of GPU memory. The CUDA context and NCCL's buffers need the rest.
_MEMORY_SHARE = 0.9

_HOPPER = re.compile(r"\b(G?H100|H20|G?H200|H800)\b")

# Environment variables that slow down every engine: the harmful value, and its effect.
_SLOWING = {
    "CUDA_LAUNCH_BLOCKING": ("1", "the CPU waits for every kernel"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of one host do not use NVLink or PCIe directly"),
    "NCCL_SHM_DISABLE": ("1", "ranks of one host without a direct GPU link use the network"),
    "NCCL_NET_GDR_LEVEL": ("LOC", "the network does not read GPU memory"),
    "NCCL_DEBUG": ("TRACE", "NCCL writes a line for every call"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is first checked for consistency across all ranks"),
}


def fp32(case: Case) -> Iterator[Finding]:
    """Report fp32 training on GPUs, unless the study sweeps the precision of a trial from fp32 to 16 bits."""
    in_fp32 = [record for record in case.on_gpus if record.precision == "fp32"]
    if all(twin.precision == "fp32" for record in in_fp32 for twin in variants(case, record)):
        for record in in_fp32:
            gpu = find_gpu(record.device or "")
            half = "fp16" if gpu and gpu.bf16_tflops is None else "bf16"
            peaks = (
                f": the peak is {gpu.fp32_tflops:g} TFLOP/s in fp32 and {gpu.peak_tflops(half):g} TFLOP/s in {half}"
                if gpu
                else ""
            )
            yield Finding(
                "slow",
                (record.trial,),
                "the trial trains in fp32",
                f"precision fp32 on {record.device}{peaks}",
                f"set precision: {half}, or remove the precision setting",
            )


def unfused(case: Case) -> Iterator[Finding]:
    """Report transformers models that run unfused kernels because Liger is not installed."""
    for record in case.on_gpus:
        is_plain = record.kernel_traits is not None and record.kernel_traits.fused_norm is False
        versions = record.environment.versions if record.environment else {}
        is_meant = record.requested_kernels == "reference"
        if is_plain and versions and "liger-kernel" not in versions and not is_meant:
            yield Finding(
                "slow",
                (record.trial,),
                "the trial runs the plain (unfused) kernels of transformers because liger-kernel is not installed",
                f"norm: {(record.kernels or {}).get('norm')}, package liger-kernel is not installed",
                "pip install liger-kernel",
            )


def slow_attention(case: Case) -> Iterator[Finding]:
    """Report attention with FlashAttention-2 on Hopper GPUs, where cuDNN's kernel is about twice as fast."""
    for record in case.on_gpus:
        kernel = (record.kernels or {}).get("attention", "")
        if "FlashAttention-2" not in kernel or not _HOPPER.search(record.device or ""):
            continue
        versions = record.environment.versions if record.environment else {}
        installed = next((version for name, version in versions.items() if name.startswith("nvidia-cudnn")), "unknown")
        yield Finding(
            "slow",
            (record.trial,),
            f"attention uses FlashAttention-2, which is about half as fast as cuDNN's attention on {record.device}",
            f"attention: {kernel}; installed cuDNN: {installed}",
            "use a cp that divides the KV heads of a tensor-parallel rank; cuDNN's attention does not support chunks"
            if "chunk" in kernel
            else "use cuDNN 9.15.1 or newer: update the nvidia-cudnn package of torch's CUDA version, and remove older "
            "CUDA libraries from LD_LIBRARY_PATH, which take precedence over this package",
        )


def environment(case: Case) -> Iterator[Finding]:
    """Report environment variables that slow down all trials.

    A variable that only some trials set counts as intended.
    """
    variables = {
        record.trial: record.environment.variables for record in case.on_gpus if record.environment is not None
    }
    for name, (value, why) in _SLOWING.items():
        have = [trial for trial, found in variables.items() if found.get(name, "").upper() == value]
        if have and len(have) == len(variables):
            yield Finding("slow", tuple(have), f"{name} is set: {why}", f"{name}={value}", f"unset {name}")
    for record in case.on_gpus:
        found = variables.get(record.trial, {})
        spec = ENGINES_AND_PROGRAMS.get(record.engine)
        if spec and spec.wants_queues and found.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            yield Finding(
                "slow",
                (record.trial,),
                "with one hardware queue, all-gathers and compute kernels block each other",
                f"CUDA_DEVICE_MAX_CONNECTIONS=1 with {record.engine}",
                "unset CUDA_DEVICE_MAX_CONNECTIONS; megatron trials with TP or CP set the variable themselves",
            )


def small_micro_batch(case: Case) -> Iterator[Finding]:
    """Report micro-batches with too few tokens to keep a GPU busy."""
    for record in case.beatable_on_gpus:
        tokens = record.micro_batch * record.seq_length // record.layout.cp
        is_open = _may_grow(record) and not was_tuned(record) and not is_tried_larger(case, record)
        if tokens < FEWEST_TOKENS and is_open:
            yield Finding(
                "slow",
                (record.trial,),
                "the micro-batch is too small to keep a GPU busy",
                f"{tokens:,} tokens per GPU and forward pass (micro-batch {record.micro_batch} × {record.seq_length}"
                f"{f' ÷ cp {record.layout.cp}' if record.layout.cp > 1 else ''})",
                "set micro_batch: auto",
            )


def unused_memory(case: Case) -> Iterator[Finding]:
    """Report unused GPU memory that allows a larger micro-batch."""
    for record in case.on_gpus:
        used = _used_memory(record)
        is_open = _may_grow(record) and not was_tuned(record) and not is_tried_larger(case, record)
        if used is not None and used < HALF and is_open:
            yield Finding(
                "slow",
                (record.trial,),
                "the trial leaves most of the GPU memory unused; a larger micro-batch would fit",
                f"peak memory {_memory(record)} at micro-batch {record.micro_batch}",
                "set micro_batch: auto",
            )


def recomputed_for_nothing(case: Case) -> Iterator[Finding]:
    """Report full activation recomputation although most of the GPU memory is free."""
    for record in case.on_gpus:
        used, level = _used_memory(record), record.options.get("recompute", "none")
        if used is not None and used < HALF and level == "full" and not record.probes:
            yield Finding(
                "slow",
                (record.trial,),
                "full recomputation runs every layer forward twice although most of the GPU memory is free",
                f"recompute: full, peak memory {_memory(record)}: {1 - used:.0%} is free",
                "set recompute: auto",
            )


def offloaded_for_nothing(case: Case) -> Iterator[Finding]:
    """Report offloaded model states that would fit in GPU memory."""
    for record in case.on_gpus:
        where = record.options.get("offload") or "none"
        if where == "none" or record.optimizer != "adamw" or not record.peak_memory_gib:
            continue
        state = POLICIES[record.precision].bytes_of_state * record.num_parameters / record.world_size / 2**30
        if record.device_memory_gib and record.peak_memory_gib.max + state < _MEMORY_SHARE * record.device_memory_gib:
            yield Finding(
                "slow",
                (record.trial,),
                "the trial keeps model states in host memory although the GPUs have room for them",
                f"offload: {where}, peak memory {_memory(record)}; the model states per GPU are {state:.1f} GiB",
                "set offload: none",
            )


def bubble(case: Case) -> Iterator[Finding]:
    """Report pipelines with a large bubble."""
    for record in case.beatable_on_gpus:
        pp, vp = record.layout.pp, record.layout.vp
        rounds = sequences_of_a_replica(record) // record.micro_batch
        share = (pp - 1) / (rounds * vp + pp - 1)
        if share > MOST_BUBBLE:
            yield Finding(
                "slow",
                (record.trial,),
                "too few micro-batches for the number of pipeline stages",
                f"{rounds} micro-batches through {pp} stages{f' of {vp} chunks' if vp > 1 else ''}: the "
                f"pipeline bubble is {share:.0%} of a step",
                "use a larger global_batch, a smaller micro_batch, fewer stages, or vp: 2",
            )


def idle_gpus(case: Case) -> Iterator[Finding]:
    """Report GPUs that are idle because they wait for the CPU or for data."""
    for record in case.on_gpus:
        busy = record.gpu_utilization
        if busy is not None and busy < LEAST_UTILIZATION:
            yield Finding(
                "slow",
                (record.trial,),
                "the GPUs are often idle because they wait for the CPU or for data",
                f"a kernel ran {busy:.0%} of the time during the timed steps",
                "find the idle time with profile: true; try a larger micro_batch, zero_leaf_layers: true (ZeRO-3), "
                "compile: true (fsdp, ddp) or more CPU cores",
            )


def needless_sharding(case: Case) -> Iterator[Finding]:
    """Report a study in which every trial shards a model that would fit on a single GPU."""
    whole = next((spec for spec in ENGINES.values() if spec.is_data_parallel and spec.sharding_stage == 0), None)
    trained = [record for record in case.on_gpus if record.optimizer == "adamw" and record.device_memory_gib]
    if not whole or not trained or any(_is_whole(record) for record in case.records):
        return
    record = trained[0]
    state = POLICIES[record.precision].bytes_of_state * record.num_parameters / 2**30
    assert record.device_memory_gib is not None
    if record.world_size > 1 and state < SMALL_REPLICA * record.device_memory_gib:
        yield Finding(
            "slow",
            (),
            f"{record.model} is small enough for plain {whole.title}, but every trial shards the model",
            f"the model states use {state:.1f} of {record.device_memory_gib:.0f} GiB per GPU; the trials are "
            f"{', '.join(dict.fromkeys(_cut(other) for other in trained))}",
            f"add a trial {{engine: {whole.name}}}",
        )


def _is_whole(record: RunRecord) -> bool:
    """Return whether each GPU holds all weights. Return True for an unknown engine."""
    spec, layout = ENGINES_AND_PROGRAMS.get(record.engine), record.layout
    return spec is None or (layout.tp == layout.pp == 1 and not spec.gathers_weights(record.options))


def _cut(record: RunRecord) -> str:
    spec = ENGINES_AND_PROGRAMS.get(record.engine)
    if not spec or not spec.gathers_weights(record.options):
        return layout_name(record)
    return spec.mode(record.options) or record.engine


def _may_grow(record: RunRecord) -> bool:
    """Return whether twice the micro-batch is valid and still leaves a pipeline 2 × PP micro-batches."""
    rounds = sequences_of_a_replica(record) // record.micro_batch
    return rounds >= 2 * (record.layout.pp if record.layout.pp == 1 else 2 * record.layout.pp) and rounds % 2 == 0


def _used_memory(record: RunRecord) -> float | None:
    if record.peak_memory_gib is None or not record.device_memory_gib:
        return None
    return record.peak_memory_gib.max / record.device_memory_gib


def _memory(record: RunRecord) -> str:
    used = _used_memory(record)
    assert used is not None and record.peak_memory_gib and record.device_memory_gib
    return f"{record.peak_memory_gib.max:.1f} of {record.device_memory_gib:.0f} GiB ({used:.0%})"
