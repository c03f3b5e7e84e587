"""The engine for torch's FSDP2, fully or hybrid sharded."""

from typing import Literal

from megabench.settings.bounds import NumRanks
from megabench.settings.reading import ConfigError
from megabench.settings.setting import EngineSettings
from megabench.specs.engine_spec import EngineSpec, Options, ResolvedRun, check_divides, more_offload
from megabench.specs.shared_settings import COMPILE, OFFLOAD, RESHARD_AFTER_FORWARD, SHARD_SIZE


class FsdpSettings(EngineSettings):
    offload: Literal["none", "optimizer", "all"] = OFFLOAD
    shard_size: NumRanks | None = SHARD_SIZE
    reshard_after_forward: bool = RESHARD_AFTER_FORWARD
    compile: bool = COMPILE


class Fsdp(EngineSpec):
    name = "fsdp"
    title = "FSDP2"
    summary = "PyTorch's FSDP2, which shards weights, gradients and optimizer state over data-parallel ranks"
    implementation = "megabench.engines.fsdp.engine:FsdpEngine"
    sharding_stage = 3
    settings = FsdpSettings
    wants_queues = True

    def check(self, run: ResolvedRun) -> None:
        own = FsdpSettings.of(run)
        check_divides("shard_size", own.shard_size, run.world_size)
        if own.offload == "optimizer":
            raise ConfigError("fsdp can offload weights only together with the optimizer state; use offload=all")

    def less_memory(self, options: Options) -> str:
        return "a larger shard_size" if options.get("shard_size") else more_offload(options)
