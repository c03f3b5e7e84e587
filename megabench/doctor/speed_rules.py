"""What makes a run slower than it need be, on GPUs."""

from collections.abc import Iterator

from megabench.doctor.finding import Case, Finding, is_tried_larger, sequences_of_a_replica, was_tuned
from megabench.hardware.gpus import find_gpu
from megabench.precision import POLICIES
from megabench.record import RunRecord
from megabench.specs.registry import ENGINES
from megabench.study.summary import layout_name

# with less than half of the memory used, twice the micro-batch is sure to fit
HALF = 0.5
# rows of a matrix product: with fewer, GPUs of today wait for launches and memory rather than compute
FEWEST_TOKENS = 2048
# the part of a step that the stages of a pipeline wait
MOST_BUBBLE = 0.2
# NVML's utilisation tells whether any kernel runs: below that, the GPU waits for the CPU or for data
LEAST_UTILIZATION = 0.8
# what a replica may take of a GPU so that the rest holds its activations
SMALL_REPLICA = 0.25
# what may be taken of a GPU: the context and NCCL's buffers need the rest
_MEMORY_SHARE = 0.9

# variables that slow every engine down, with the values that do
_SLOWING = {
    "CUDA_LAUNCH_BLOCKING": ("1", "the CPU waits for every kernel"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of one host do not use NVLink or PCIe directly"),
    "NCCL_SHM_DISABLE": ("1", "ranks of one host talk over the network where they cannot reach each other directly"),
    "NCCL_NET_GDR_LEVEL": ("LOC", "the network does not read GPU memory"),
    "NCCL_DEBUG": ("TRACE", "NCCL writes a line for every call"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked against all ranks first"),
}


def fp32(case: Case) -> Iterator[Finding]:
    """Training in fp32 on GPUs that are many times faster in 16 bit, unless the same is tried in 16 bit as well."""
    halves = [record for record in case.records if record.precision != "fp32"]
    tried = [(record.engine, record.layout, record.options) for record in halves]
    for record in case.on_gpus:
        if record.precision == "fp32" and (record.engine, record.layout, record.options) not in tried:
            gpu = find_gpu(record.device or "")
            half = "fp16" if gpu and gpu.bf16_tflops is None else "bf16"
            peaks = f": its peak is {gpu.fp32_tflops:g} TFLOP/s, {gpu.peak_tflops(half):g} in {half}" if gpu else ""
            yield Finding(
                "slow",
                (record.trial,),
                "trains in fp32",
                f"precision fp32 on {record.device}{peaks}",
                f"precision: {half}, or leave precision out",
            )


def unfused(case: Case) -> Iterator[Finding]:
    """Transformers models without Liger's kernels because they are not installed."""
    for record in case.on_gpus:
        is_plain = record.kernel_traits is not None and record.kernel_traits.fused_norm is False
        versions = record.environment.versions if record.environment else {}
        is_meant = record.requested_kernels == "reference"
        if is_plain and versions and "liger-kernel" not in versions and not is_meant:
            yield Finding(
                "slow",
                (record.trial,),
                "runs transformers' plain kernels, for Liger's are not installed",
                f"norm: {(record.kernels or {}).get('norm')}, no liger-kernel among the versions",
                "pip install liger-kernel",
            )


def environment(case: Case) -> Iterator[Finding]:
    """Variables of the shell that slow things down; what one trial alone sets is meant."""
    variables = {
        record.trial: record.environment.variables for record in case.on_gpus if record.environment is not None
    }
    for name, (value, why) in _SLOWING.items():
        have = [trial for trial, found in variables.items() if found.get(name, "").upper() == value]
        if have and len(have) == len(variables):
            yield Finding("slow", tuple(have), f"{name} is set: {why}", f"{name}={value}", f"unset {name}")
    for record in case.on_gpus:
        found = variables.get(record.trial, {})
        spec = ENGINES.get(record.engine)
        if spec and spec.wants_queues and found.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            yield Finding(
                "slow",
                (record.trial,),
                "has one hardware queue, in which gathering and compute wait for each other",
                f"CUDA_DEVICE_MAX_CONNECTIONS=1 with {record.engine}",
                "unset CUDA_DEVICE_MAX_CONNECTIONS; megatron's TP and CP trials set it themselves",
            )


def small_micro_batch(case: Case) -> Iterator[Finding]:
    """Forward passes of too few tokens to keep a GPU busy."""
    for record in case.on_gpus:
        tokens = record.micro_batch * record.seq_length // record.layout.cp
        if tokens < FEWEST_TOKENS and _may_grow(record) and not was_tuned(record):
            yield Finding(
                "slow",
                (record.trial,),
                "has a micro-batch too small to keep a GPU busy",
                f"{tokens:,} tokens a GPU and forward pass (micro-batch {record.micro_batch} × {record.seq_length}"
                f"{f' ÷ cp {record.layout.cp}' if record.layout.cp > 1 else ''})",
                "micro_batch: auto",
            )


def unused_memory(case: Case) -> Iterator[Finding]:
    """Memory that a larger micro-batch would use."""
    for record in case.on_gpus:
        used = _used_memory(record)
        is_open = _may_grow(record) and not was_tuned(record) and not is_tried_larger(case, record)
        if used is not None and used < HALF and is_open:
            yield Finding(
                "slow",
                (record.trial,),
                "leaves most of the memory unused, and its micro-batch could be larger",
                f"{_memory(record)} at micro-batch {record.micro_batch}",
                "micro_batch: auto",
            )


def recomputed_for_nothing(case: Case) -> Iterator[Finding]:
    """Layers that run forward twice although there is memory."""
    for record in case.on_gpus:
        used, level = _used_memory(record), record.options.get("recompute", "none")
        if used is not None and used < HALF and level == "full" and not record.probes:
            yield Finding(
                "slow",
                (record.trial,),
                "runs every layer forward twice although most of the memory is free",
                f"recompute: full, {_memory(record)}: {1 - used:.0%} is free",
                "recompute: auto",
            )


def offloaded_for_nothing(case: Case) -> Iterator[Finding]:
    """State in host memory that the GPUs have room for."""
    for record in case.on_gpus:
        where = record.options.get("offload") or "none"
        if where == "none" or record.optimizer != "adamw" or not record.peak_memory_gib:
            continue
        state = POLICIES[record.precision].bytes_of_state * record.num_parameters / record.world_size / 2**30
        if record.device_memory_gib and record.peak_memory_gib.max + state < _MEMORY_SHARE * record.device_memory_gib:
            yield Finding(
                "slow",
                (record.trial,),
                "keeps state in host memory that the GPUs have room for",
                f"offload: {where}, {_memory(record)}, and a GPU's part of the state is {state:.1f} GiB",
                "offload: none",
            )


def bubble(case: Case) -> Iterator[Finding]:
    """Pipelines whose stages wait for each other."""
    for record in case.on_gpus:
        pp, vp = record.layout.pp, record.layout.vp
        rounds = sequences_of_a_replica(record) // record.micro_batch
        share = (pp - 1) / (rounds * vp + pp - 1)
        if share > MOST_BUBBLE:
            yield Finding(
                "slow",
                (record.trial,),
                "has too few micro-batches for its pipeline",
                f"{rounds} micro-batches through {pp} stages{f' of {vp} chunks' if vp > 1 else ''}: stages wait "
                f"{share:.0%} of a step",
                "a larger global_batch, a smaller micro_batch, fewer stages, or vp: 2",
            )


def idle_gpus(case: Case) -> Iterator[Finding]:
    """GPUs that wait for the CPU, or for data."""
    for record in case.on_gpus:
        busy = record.gpu_utilization
        if busy is not None and busy < LEAST_UTILIZATION:
            yield Finding(
                "slow",
                (record.trial,),
                "leaves its GPUs idle: they wait for the CPU or for data",
                f"a kernel ran {busy:.0%} of the timed steps",
                "profile: true shows where; a larger micro_batch, zero_leaf_layers: true (ZeRO-3), compile: true "
                "(fsdp, ddp), more CPU cores",
            )


def needless_sharding(case: Case) -> Iterator[Finding]:
    """A model that fits on each GPU as a whole, in a study in which nobody has it whole."""
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
            f"{record.model} is small enough for plain {whole.title}, and every trial cuts it",
            f"weights, gradients and optimizer take {state:.1f} of {record.device_memory_gib:.0f} GiB; the trials are "
            f"{', '.join(dict.fromkeys(_cut(other) for other in trained))}",
            f"add a trial {{engine: {whole.name}}}",
        )


def _is_whole(record: RunRecord) -> bool:
    """Whether each GPU holds all weights; assumed for an unknown engine."""
    spec, layout = ENGINES.get(record.engine), record.layout
    return spec is None or (layout.tp == layout.pp == 1 and not spec.gathers_weights(record.options))


def _cut(record: RunRecord) -> str:
    spec = ENGINES.get(record.engine)
    if not spec or not spec.gathers_weights(record.options):
        return layout_name(record)
    return spec.mode(record.options) or record.engine


def _may_grow(record: RunRecord) -> bool:
    """Whether twice the micro-batch is legal, and leaves a pipeline enough of them."""
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
