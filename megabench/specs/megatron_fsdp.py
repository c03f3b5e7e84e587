"""The engine for NVIDIA's Megatron-FSDP: ZeRO-3 inside groups of ranks, ZeRO-1 across them."""

from megabench.settings.bounds import NumRanks
from megabench.settings.setting import EngineSettings
from megabench.specs.engine_spec import EngineSpec, Options, ResolvedRun, check_divides
from megabench.specs.shared_settings import SHARD_SIZE


class MegatronFsdpSettings(EngineSettings):
    shard_size: NumRanks | None = SHARD_SIZE


class MegatronFsdp(EngineSpec):
    name = "megatron_fsdp"
    title = "Megatron-FSDP"
    summary = "NVIDIA's Megatron-FSDP: ZeRO-3 inside groups of ranks, and ZeRO-1 across groups"
    implementation = "megabench.engines.megatron_fsdp.engine:MegatronFsdpEngine"
    sharding_stage = 3
    settings = MegatronFsdpSettings
    wants_queues = True

    def check(self, run: ResolvedRun) -> None:
        check_divides("shard_size", MegatronFsdpSettings.of(run).shard_size, run.world_size)

    def less_memory(self, options: Options) -> str:
        return "a larger shard_size" if options.get("shard_size") else "more GPUs"
