"""The engine for torch's DistributedDataParallel, with full replicas."""

from megabench.settings.bounds import MatrixRank
from megabench.settings.reading import ConfigError
from megabench.settings.setting import EngineSettings, setting
from megabench.specs.data_parallel_cost import DataParallel
from megabench.specs.data_parallel_memory import data_parallel_memory
from megabench.specs.engine_spec import EngineSpec, Options, ResolvedRun
from megabench.specs.fp8_check import check_keep_transposed
from megabench.specs.sharding import Sharding
from megabench.specs.shared_settings import COMPILE, KEEP_TRANSPOSED

# the minimum number of uncompressed first steps that torch's hook requires with error feedback
POWERSGD_PLAIN_STEPS = 2


class DdpSettings(EngineSettings):
    powersgd_rank: MatrixRank | None = setting(None, "Engine and layout", "option", "free", label="PowerSGD rank {}")
    """Compress ddp's gradients to this rank (PowerSGD): less communication, approximate gradients."""

    compile: bool = COMPILE
    keep_transposed: bool = KEEP_TRANSPOSED


def _check(run: ResolvedRun) -> None:
    if run.grad_dtype == "bf16" and DdpSettings.of(run).powersgd_rank:
        raise ConfigError("powersgd_rank sends fp32 factors; use grad_dtype=fp32, or omit powersgd_rank")
    own = DdpSettings.of(run)
    check_keep_transposed(run, own.keep_transposed, keeps_casts=not own.compile)


def _why_not_saved(run: ResolvedRun) -> str | None:
    if rank := DdpSettings.of(run).powersgd_rank:
        return (
            f"checkpoints do not include PowerSGD's error-feedback state. Disable powersgd_rank={rank}, or train "
            f"without --save and --load."
        )
    return None


def _compression(options: Options) -> str | None:
    rank = options.get("powersgd_rank")
    return f"PowerSGD, rank {rank}" if rank else None


SPEC = EngineSpec(
    name="ddp",
    title="DDP",
    summary="PyTorch's DDP, which replicates the model on every rank",
    implementation="megabench.engines.ddp.engine:DdpEngine",
    cost=DataParallel,
    memory=data_parallel_memory,
    sharding_stage=0,
    settings=DdpSettings,
    check=_check,
    why_not_saved=_why_not_saved,
    holds_matrices=lambda options: True,
    compression=_compression,
    plain_steps=lambda options: POWERSGD_PLAIN_STEPS if options.get("powersgd_rank") else 0,
    less_memory=lambda options: "engine: fsdp, or deepspeed with zero_stage: 3, which shard what ddp copies",
    variants=lambda ranks_per_host, layout: [Sharding(0)],
    variant_of=lambda options: Sharding(0),
)
