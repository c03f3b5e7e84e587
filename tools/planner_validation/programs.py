"""Other training programs: their properties that affect the cost, and their jobs. This module does not import torch."""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import Literal

from pydantic import Field

from megabench.cost.compute import LOSS_BYTES
from megabench.cost.job import Copies, Job, Stack
from megabench.cost.profile import Profile
from megabench.parallel.layout import Layout


@dataclass(frozen=True)
class Program(Stack):
    """Properties of a training program. program_costs.py has their costs, beyond those of megabench's own `Stack`.

    - `flash_version`: attention uses FlashAttention-1 or 2, which are slow on Hopper, or cuDNN.
    - `passes_keys`: context parallelism passes keys and values around in a ring, and attention makes a call for each
      of cp parts (Transformer Engine).
    - `sequence_parallel`: tensor parallelism divides norms and residuals as well, by the sequence.
    - `loss_bytes`: bytes per logit that the loss reads and writes, forward and backward.
    - `overlaps_gradients`, and `overlaps_sharded_gradients` with a sharded optimizer: gradients are reduced during
      backward, in buckets of `bucket_parameters`. `overlaps_parameters`: weights are gathered during forward.
    - `user_buffers`: all gathers and reduce-scatters of tensor parallelism overlap with matrix products of the same
      layer. Copy engines or two SMs gather, so that gathers do not slow the products down; 24 SMs reduce (NeMo's
      user-buffer configurations of H100, with Transformer Engine's methods ring_exchange, bulk and pipeline).
    - `blocking_p2p`: pipeline stages wait for their sends, except with interleaving.
    - `launches_forward`: the host time of a layer's forward pass, in launches of a plain torch operation, and
      `launches_fp8` the additional time with fp8 products.
    - `fills_stages`: pipeline stages are filled with layers one after another (nanotron).
    - `delayed_scaling`: fp8 casts use the scales of earlier steps and read their tensor once. Norms and activations
      write fp8 values. The largest values are reduced over the ranks once per step (Transformer Engine).
    - `accumulates_at_end`: a backward pass first stores the 16-bit gradients of all weights.
    - `copies_kept`: activations include copies that other training programs avoid.
    - `holds_sent`: tensors that NCCL's stream uses stay allocated until the GPU has passed the collective.
    - `flattens_shards`: gradients and weights are copied into one flat tensor for a sharded optimizer's collectives.
    - `sliced_tensors`: the number of tensors in a layer, if Python copies a slice of each tensor for each replica
      before and after these collectives.
    - `flat_parameters`: parameters are communicated without copies (FSDP1).
    - `broadcasts_tensors`: a sharded optimizer shards by whole tensors. All replicas all-reduce the gradients, and each
      rank broadcasts the weights that it has updated.
    """

    copies: Copies = "never"
    fused_loss: bool = False
    stages: Literal["balanced", "even"] = "even"
    flash_version: Literal[1, 2, "cudnn"] = "cudnn"
    passes_keys: bool = False
    sequence_parallel: bool = True
    loss_bytes: tuple[int, int] = LOSS_BYTES
    dropout: bool = False
    overlaps_gradients: bool = True
    overlaps_sharded_gradients: bool = True
    overlaps_parameters: bool = True
    user_buffers: bool = False
    blocking_p2p: bool = True
    launches_forward: float = 22
    launches_fp8: float = 12
    bucket_parameters: float = 40e6
    buckets_on_all_stages: bool = False
    fills_stages: bool = False
    delayed_scaling: bool = False
    accumulates_at_end: bool = False
    copies_kept: bool = False
    holds_sent: bool = False
    flattens_shards: bool = False
    sliced_tensors: int = 0
    flat_parameters: bool = False
    broadcasts_tensors: bool = False


class ProgramProfile(Profile):
    """A profile with the constants of kernels that only other training programs use."""

    flash_1_share: float = Field(1, gt=0, le=1)
    """FLOP/s of FlashAttention-1 divided by that of cuDNN's attention."""


@dataclass(frozen=True)
class ProgramJob(Job):
    """The work of one optimizer step of another training program."""

    stack: Program = field(default_factory=Program)

    @property
    def output_layers(self) -> float:
        """The size of the output layer, in layers."""
        return self.embedding_parameters / self.layer_parameters

    def chunk_layers(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        if self.stack.fills_stages:
            return _filled(self.shape.num_layers, self.output_layers, layout.pp)
        return super().chunk_layers(layout)


@lru_cache(maxsize=4096)
def _filled(num_layers: int, output_layers: float, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the number of layers of each stage. Stages are filled one after another up to their share of the total."""
    each = (num_layers + output_layers) / num_stages
    filled = [min(num_layers, ceil(number * each)) for number in range(num_stages)] + [num_layers]
    return tuple((after - before,) for before, after in pairwise(filled))
