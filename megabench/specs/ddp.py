"""The engine for torch's DistributedDataParallel, with full replicas."""

from megabench.settings.bounds import MatrixRank
from megabench.settings.reading import ConfigError
from megabench.settings.setting import EngineSettings, setting
from megabench.specs.engine_spec import EngineSpec, Options, ResolvedRun
from megabench.specs.fp8_check import check_keep_transposed
from megabench.specs.shared_settings import COMPILE, KEEP_TRANSPOSED

# the minimum number of uncompressed first steps that torch's hook requires with error feedback
POWERSGD_PLAIN_STEPS = 2


class DdpSettings(EngineSettings):
    powersgd_rank: MatrixRank | None = setting(None, "Engine and layout", "option", "free", label="PowerSGD rank {}")
    """Compress ddp's gradients to this rank (PowerSGD): less communication, approximate gradients."""

    compile: bool = COMPILE
    keep_transposed: bool = KEEP_TRANSPOSED


class Ddp(EngineSpec):
    name = "ddp"
    title = "DDP"
    summary = "PyTorch's DDP, which replicates the model on every rank"
    implementation = "megabench.engines.ddp.engine:DdpEngine"
    sharding_stage = 0
    settings = DdpSettings

    def check(self, run: ResolvedRun) -> None:
        own = DdpSettings.of(run)
        if run.grad_dtype == "bf16" and own.powersgd_rank:
            raise ConfigError("powersgd_rank sends fp32 factors; use grad_dtype=fp32, or omit powersgd_rank")
        check_keep_transposed(run, own.keep_transposed, keeps_casts=not own.compile)

    def why_not_saved(self, run: ResolvedRun) -> str | None:
        if rank := DdpSettings.of(run).powersgd_rank:
            return (
                f"checkpoints do not include PowerSGD's error-feedback state. Disable powersgd_rank={rank}, or train "
                f"without --save and --load."
            )
        return None

    def holds_matrices(self, options: Options) -> bool:
        return True

    def compression(self, options: Options) -> str | None:
        rank = options.get("powersgd_rank")
        return f"PowerSGD, rank {rank}" if rank else None

    def plain_steps(self, options: Options) -> int:
        return POWERSGD_PLAIN_STEPS if options.get("powersgd_rank") else 0

    def less_memory(self, options: Options) -> str:
        return "engine: fsdp, or deepspeed with zero_stage: 3, which shard what ddp copies"
