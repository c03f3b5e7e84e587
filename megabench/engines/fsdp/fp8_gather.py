"""All-gathers of fp8 weights under FSDP2, through the hooks `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

FSDP2 gathers what `fsdp_pre_all_gather` of a shard returns, and computes with what `fsdp_post_all_gather` makes of it.
These hooks cast each rank's rows under the scale of the whole weight, which `Fp8Shards.update_scales` computes once per
step. The gathered rows are therefore those of the whole weight cast at once.

Sizes: Symbols: N rows of a weight, K columns.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from megabench.engines.common.fp8 import Fp8Weight, quantize
from megabench.engines.common.fp8_format import DTYPE, quantization_scale


class Fp8Shards:
    """This rank's shards of the weights that FSDP2 gathers in fp8.

    `update_scales` must be called before the first forward pass after the weights changed.
    """

    def __init__(self, weights: Sequence[Any], dtype: torch.dtype, device: torch.device) -> None:
        """Make FSDP2 gather `weights` in fp8, which it has sharded and which have memory.

        They are rounded to `dtype` first, as layers round the weights that they cast themselves.
        """
        self._dtype, self._device = dtype, device
        self._scales = [_Scale(*(torch.zeros((), device=device) for _ in _Scale._fields)) for _ in weights]
        self._values = []
        for weight, scale in zip(weights, self._scales, strict=True):
            local = weight._local_tensor
            # a rank has no rows if there are fewer rows than ranks
            self._values.append(local if local.numel() else local.new_zeros(1))
            weight._local_tensor = _Shard.of(local, scale)

    @torch.no_grad()
    def update_scales(self) -> None:
        """Compute the scales of all weights from their largest values on all ranks."""
        largest = torch.stack(torch._foreach_norm(self._values, math.inf))
        # rounding the largest value is the same as rounding all values first
        amaxes = largest.to(self._device, self._dtype).float()
        _reduce_amaxes(amaxes)
        torch._foreach_copy_([scale.amax for scale in self._scales], amaxes.unbind())
        torch._foreach_copy_([scale.scale for scale in self._scales], (1 / quantization_scale(amaxes)).unbind())


def _reduce_amaxes(amaxes: Tensor) -> None:
    """Replace the largest values [weights] of this rank's shards by those of all ranks."""
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX)


class _Scale(NamedTuple):
    """The amax and the scale of a whole weight, as fp32 scalars that are updated in place."""

    amax: Tensor
    scale: Tensor


class _Shard(Tensor):
    """A rank's rows of a weight [N, K], which share the memory of a plain tensor. Operations return plain tensors."""

    of_weight: _Scale

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, rows: Tensor, scale: _Scale) -> "_Shard":
        shard = rows.as_subclass(cls)
        shard.of_weight = scale
        return shard

    def to(self, *args: Any, **kwargs: Any) -> "_Shard":
        """FSDP2 moves an offloaded shard to the GPU and then calls the hooks of the result."""
        return _Shard.of(super().to(*args, **kwargs), self.of_weight)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the fp8 rows and their scale. The rows are viewed as bytes, because gloo cannot send fp8."""
        assert mp_policy.param_dtype is not None
        values = super().to(mp_policy.param_dtype)
        rows = quantize(values, columns=False, amax=self.of_weight.amax).rows.view(torch.uint8)
        if missing := math.ceil(outer_size[0] / mesh.size()) - len(rows):  # all ranks send the same size
            rows = F.pad(rows, (0, 0, 0, missing))
        return (rows,), self.of_weight.scale

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], scale: Tensor, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the gathered weight as a view of the gathered bytes.

        FSDP2 calls this hook again with the first result as `out`, after it has written into the same bytes.
        """
        return None if out is not None else (Fp8Weight(gathered[0].view(DTYPE), scale, param_dtype), ())
