"""torch's DistributedDataParallel: whole replicas."""

from megabench.specs.base import EngineSpec, Variant
from megabench.specs.data_parallel_cost import DataParallel

SPEC = EngineSpec(
    name="ddp",
    title="DDP",
    summary="DDP, PyTorch's plain data parallelism",
    implementation="megabench.engines.ddp.engine:DdpEngine",
    cost=DataParallel,
    sharding_stage=0,
    less_memory=lambda options: "engine: fsdp, or deepspeed with zero_stage: 3, which shard what ddp copies",
    holds_matrices=lambda run: True,
    variants=lambda ranks_per_host: [Variant(0)],
)
