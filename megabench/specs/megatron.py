"""The engine for TP × PP × CP × DP with megatron-core."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any, Literal

from megabench.hardware.topology import Topology
from megabench.metrics import output_layer_cost
from megabench.models.mapping import hugging_face_shapes, parallel_parameters, shard
from megabench.models.shape import ModelShape
from megabench.parallel.layout import divisors, rank_groups
from megabench.settings.bounds import NumRanks
from megabench.settings.reading import ConfigError
from megabench.settings.run_settings import RunSettings
from megabench.settings.setting import EngineSettings, setting
from megabench.specs.engine_spec import EngineSpec, Options, ResolvedRun
from megabench.specs.fp8_check import check_keep_transposed
from megabench.specs.shared_settings import KEEP_TRANSPOSED, SHARD_SIZE


class MegatronSettings(EngineSettings):
    stages: Literal["balanced", "even"] = setting(
        "balanced", "Engine and layout", "option", "free", label="even stages"
    )
    """Layers per pipeline stage: balanced (equal time, counting the output layer) or even (equal numbers)."""

    keep_gathered: bool = setting(False, "Engine and layout", "option", "free", label="gathered kept")
    """Keep the inputs that TP gathered for the backward pass: a fifth less TP communication, more memory."""

    tp_overlap: Literal["auto", "copy-engines", "nccl"] | None = setting(
        None, "Engine and layout", "option", "free", label="TP by {}"
    )
    """How TP exchanges activations: copy-engines (overlaps products), nccl, or auto (default: by links and sizes)."""

    shard_size: NumRanks | None = SHARD_SIZE
    keep_transposed: bool = KEEP_TRANSPOSED


def tp_overlap(run: ResolvedRun) -> Literal["copy-engines", "nccl"]:
    """Return how tensor-parallel ranks exchange activations. On CPU, "auto" means collectives."""
    return "copy-engines" if MegatronSettings.of(run).tp_overlap == "copy-engines" else "nccl"


def optimizer_copies(run: ResolvedRun) -> int:
    """Return the number of copies of the optimizer state. Each copy is sharded over neighbouring replicas."""
    shard_size = MegatronSettings.of(run).shard_size
    return run.world_size // run.layout.pp // shard_size if shard_size else 1


def chunk_layers(run: ResolvedRun) -> list[list[range]]:
    """Return the layer numbers of every model chunk of a megatron run, as [stage][chunk]."""

    is_balanced = MegatronSettings.of(run).stages == "balanced"
    cost = output_layer_cost(run.shape, run.seq_length) if is_balanced else 0.0
    return run.layout.chunk_layers(run.shape.num_layers, cost)


class Megatron(EngineSpec):
    name = "megatron"
    title = "megatron-core"
    summary = "NVIDIA's megatron-core, with tensor, pipeline, context and data parallelism"
    implementation = "megabench.engines.megatron.engine:MegatronEngine"
    sharding_stage = 1
    settings = MegatronSettings
    axes = frozenset({"tp", "pp", "vp", "cp", "dp"})
    recompute = frozenset({"none", "selective", "full"})
    optimizers = frozenset({"adamw", "sgd"})
    needs_blocks = True

    def check(self, run: ResolvedRun) -> None:
        own = MegatronSettings.of(run)
        if own.keep_gathered and (run.layout.tp == 1 or run.kernels == "reference"):
            raise ConfigError(
                "keep_gathered needs megabench's tensor-parallel layers; use tp=2 or more and kernels=auto, or omit "
                "keep_gathered"
            )
        if own.keep_gathered and run.fp8_recipe == "bf16-gradients":
            raise ConfigError(
                "keep_gathered does not work with fp8_recipe=bf16-gradients, which gathers inputs again in bf16 for "
                "the backward pass; omit keep_gathered, or use fp8_recipe=tensorwise"
            )
        if own.tp_overlap == "copy-engines" and (run.layout.tp == 1 or run.kernels == "reference"):
            raise ConfigError(
                "tp_overlap=copy-engines needs megabench's tensor-parallel layers; use tp=2 or more and kernels=auto, "
                "or omit tp_overlap"
            )
        if own.tp_overlap == "copy-engines" and own.keep_gathered:
            raise ConfigError(
                "keep_gathered does not work with tp_overlap=copy-engines, because all layers share the memory of "
                "gathered inputs; omit one of them"
            )
        check_keep_transposed(run, own.keep_transposed, keeps_casts=True)
        _check_shard_size(run, own.shard_size)
        if run.param_groups:
            _check_fused_parameters(run)

    def settle(self, run: ResolvedRun, topology: Topology) -> tuple[Mapping[str, Any], str | None]:
        given = MegatronSettings.of(run).tp_overlap
        if run.layout.tp == 1 or given == "nccl":
            return {}, None
        obstacle = _obstacle_to_copies(run, topology)
        if given == "copy-engines":
            if obstacle:
                raise ConfigError(f"tp_overlap=copy-engines is impossible, because {obstacle}; use tp_overlap=nccl")
            return {}, None
        if why := _other_kernels(run) or obstacle or _too_short_products(run):
            return {"tp_overlap": "nccl"}, f"tensor parallelism uses NCCL (tp_overlap=nccl), because {why}"
        return {"tp_overlap": "copy-engines"}, None

    def environment(self, run: RunSettings) -> Mapping[str, str]:
        """Use one hardware queue under TP and CP, so that collectives start before the GEMMs that overlap them.

        Runs without TP and CP need several hardware queues, and so do copies between the GPUs of a TP group.
        """
        has_one_queue = (run.tp > 1 or run.cp > 1) and MegatronSettings.of(run).tp_overlap != "copy-engines"
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if has_one_queue else {}

    def less_memory(self, options: Options) -> str:
        return "a larger tp inside a host, or pp across hosts"


def _other_kernels(run: ResolvedRun) -> str | None:
    """Say which setting selects layers that do not copy."""
    if run.kernels == "reference":
        return "kernels=reference uses megatron-core's layers"
    return "keep_gathered keeps what is gathered" if MegatronSettings.of(run).keep_gathered else None


def _obstacle_to_copies(run: ResolvedRun, topology: Topology) -> str | None:
    """Say why the GPUs of a tensor-parallel group cannot write into each other's memory over NVLink."""
    if any(host.has_one_queue for host in topology.hosts):
        return "the environment sets CUDA_DEVICE_MAX_CONNECTIONS=1, and copies need a hardware queue of their own"
    if any(host.sees_one_gpu for host in topology.hosts):
        return "each process sees only its own GPU, and torch's symmetric memory needs to see those of the group"
    for ranks in rank_groups(run.layout)["tp"]:
        link = topology.slowest_link(combinations(ranks, 2))
        if len({topology.host_of[rank] for rank in ranks}) > 1:
            return f"the TP group of ranks {ranks[0]} to {ranks[-1]} spans several hosts"
        if link != "nvlink":
            return f"the TP group of ranks {ranks[0]} to {ranks[-1]} communicates over {link}"
    return None


def _too_short_products(run: ResolvedRun) -> str | None:
    """Say that the products of a layer are too short for copies."""
    tokens = run.micro_batch * run.seq_length // run.layout.cp
    if copies_pay(run.shape, tokens, run.layout.tp, run.policy.has_fp8_products):
        return None
    return f"the products of {tokens} tokens end before the host has launched the copies that they would overlap with"


def copies_pay(shape: ModelShape, num_tokens: float, tp: int, has_fp8_products: bool) -> bool:
    """Return whether copy engines exchange the activations of a layer in less time than NCCL, as measured on H200s.

    The host launches one copy and one product for each other rank, so it needs longer with a larger tp. Copies pay if
    the GPU needs as long for a layer. The limits follow from the measured times of one MLP (benchmarks/README.md, "Copy
    engines by size"), which take the host 2.0 ms with tp=2 and 3.4 ms with tp=4. A layer in fp8 takes two thirds of the
    time of one in bf16.
    """
    flops_of_mlp = 18 * num_tokens * shape.hidden_size * shape.ffn_size / tp
    return flops_of_mlp >= (1.2e12 + 0.6e12 * tp) * (1.5 if has_fp8_products else 1)


def _check_fused_parameters(run: ResolvedRun) -> None:
    """Raise ConfigError if the Hugging Face tensors of one parameter have different hyper-parameters."""
    sizes = hugging_face_shapes(run.shape)
    for parameter in parallel_parameters(run.shape, range(run.shape.num_layers), has_embedding=True, has_output=True):
        first, *others = sorted({piece.name for piece in shard(parameter, run.shape, 1, 0).pieces})
        for other in others:
            if run.hyper_parameters(first, len(sizes[first])) != run.hyper_parameters(other, len(sizes[other])):
                raise ConfigError(
                    f"param_groups has different values for {first} and {other}, which are one parameter of the "
                    f"megatron engine; use a pattern that matches both, or another engine"
                )


def _check_shard_size(run: ResolvedRun, shard_size: int | None) -> None:
    layout = run.layout
    per_stage = run.world_size // layout.pp
    if shard_size and (per_stage % shard_size or shard_size % layout.tp):
        sizes = [size for size in divisors(per_stage) if size % layout.tp == 0]
        what = f"the {per_stage} ranks" + " of a pipeline stage" * (layout.pp > 1)
        raise ConfigError(
            f"shard_size={shard_size} must divide {what} and be a multiple of tp={layout.tp}; use one of {sizes}"
        )
