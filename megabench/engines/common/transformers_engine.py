"""Base class of the engines that train transformers models."""

from dataclasses import replace

from torch import Tensor

from megabench.checkpoint.shards import TrainingState
from megabench.config import ResolvedConfig
from megabench.engines.base import DataParallelEngine
from megabench.engines.common import kernels
from megabench.engines.common.transformers_model import OptimizerState, PersistentBuffers, optimizer_name
from megabench.record import KernelTraits


class TransformersEngine(DataParallelEngine):
    """What engines for transformers models report about a run; see `megabench.engines.base.Engine`.

    `loss` is the sum of this rank's losses over the micro-batches of the last step, each divided by their number.
    """

    run: ResolvedConfig
    state: OptimizerState
    buffers: PersistentBuffers
    loss: Tensor

    def training_state(self) -> TrainingState:
        state = self.state.read()
        return replace(state, shards=state.shards + self.buffers.shards())

    def restored(self, optimizer_step: int, loss_scale: dict[str, float] | None) -> None:
        self.state.restored(optimizer_step, loss_scale)
        self.buffers.restored()

    @property
    def rank_loss(self) -> float:
        return self.loss.item()

    @property
    def kernels(self) -> dict[str, str]:
        return kernels.names_for_transformers(self.run) | {"optimizer": optimizer_name(self.run)}

    @property
    def kernel_traits(self) -> KernelTraits:
        return kernels.traits_for_transformers(self.run)
