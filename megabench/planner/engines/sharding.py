"""Sharding variants of the data-parallel engines: DeepSpeed ZeRO, FSDP2, DDP. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from megabench.cost.job import Candidate, Job

Offload = Literal["none", "optimizer", "all"]


@dataclass(frozen=True)
class Sharding:
    """The sharding and offload options of a data-parallel run. `zero_stage` is 3 for FSDP2 and 0 for DDP.

    With `keeps_weights`, ZeRO-3 and FSDP2 keep the weights gathered from forward to backward. FSDP2 shards over groups
    of `shard_size` neighbouring ranks (HSDP). With `shards_across`, as in Megatron-FSDP, the optimizer state is also
    sharded across these groups. ZeRO-3 gathers over groups of `hpz_size` neighbouring ranks in backward (hpZ).
    """

    zero_stage: int
    offload: Offload = "none"
    shard_size: int | None = None
    hpz_size: int | None = None
    keeps_weights: bool = False
    shards_across: bool = False

    @classmethod
    def of(cls, zero_stage: int, options: Mapping[str, Any]) -> "Sharding":
        """Return the sharding of a recorded run with these options."""
        return cls(
            zero_stage,
            offload=options.get("offload") or "none",
            shard_size=options.get("shard_size"),
            hpz_size=options.get("hpz_size"),
            keeps_weights=options.get("reshard_after_forward") is False,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The non-default settings of a run with this sharding, except the ZeRO stage."""
        given = {
            "offload": None if self.offload == "none" else self.offload,
            "shard_size": self.shard_size,
            "hpz_size": self.hpz_size,
            "reshard_after_forward": False if self.keeps_weights else None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def prefix(self, engine: str) -> str:
        return f"zero{self.zero_stage}·" if engine == "deepspeed" else f"{engine}·"

    @property
    def words(self) -> list[str]:
        words = [f"offload-{self.offload}"] * (self.offload != "none") + ["kept"] * self.keeps_weights
        words += [f"shard{self.shard_size}"] * bool(self.shard_size) + [f"hpz{self.hpz_size}"] * bool(self.hpz_size)
        return words

    @property
    def kind(self) -> tuple[int, Offload]:
        return self.zero_stage, self.offload


def gathered_bytes(job: Job, candidate: Candidate) -> float:
    """Return the mean bytes per parameter of the blocks' matrices that ZeRO-3, FSDP2 or Megatron-FSDP gathers.

    FSDP2 gathers weights that are only multiplied in fp8 as fp8 values (engines/fsdp/).
    """
    share = job.fp8_share("input_gradient") if candidate.engine == "fsdp" else 0.0
    return share + (1 - share) * job.bytes_of_value


def keeps_weight_casts(candidate: Candidate) -> bool:
    """Return whether an fp8 run casts the weights of its blocks once per step and keeps the casts until backward ends.

    Engines that gather weights, and compiled blocks, cast them in each pass (engines/common/fp8_linear.py).
    """
    return sharding_of(candidate).zero_stage < 3 and not candidate.is_compiled


def sharding_of(candidate: Candidate) -> Sharding:
    """Return the sharding of a data-parallel candidate."""
    return cast(Sharding, candidate.variant)
