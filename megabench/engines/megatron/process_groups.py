"""megatron-core's process groups of a layout."""

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megabench.parallel.layout import Layout


def create(layout: Layout, optimizer_copies: int = 1) -> ProcessGroupCollection:
    """Create megatron-core's process groups of a layout. The ranks of the default process group must be placed already.

    `optimizer_copies` is the number of copies of the optimizer state. Each copy is sharded over neighbouring replicas.

    The groups are part of megatron-core's global state. A second call returns the same groups.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
            context_parallel_size=layout.cp,
            num_distributed_optimizer_instances=optimizer_copies,
            create_gloo_process_groups=False,
        )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    sizes = (groups.tp.size(), groups.cp.size(), groups.pp.size(), groups.dp.size())
    assert sizes == (layout.tp, layout.cp, layout.pp, layout.dp), "one process, one layout"
    return groups
