"""fp8 casts of the weights of linear layers, which are valid for one step.

Sizes: Symbols: K input size, N output size of a layer.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megabench.engines.common.fp8 import Quantized, quantize


class CastsWeight(nn.Module):
    """A layer whose weight [N, K] is cast to fp8 once per step, in both layouts or in rows only.

    A layer that `has_bf16_gradients` does not need columns. A layer that does not keep them (`keeps_transposed`)
    transposes the rows in each backward pass. `forget_casts` must be called between two steps, because the weights
    change.
    """

    weight: Tensor
    has_bf16_gradients: bool
    keeps_transposed: bool
    _cast: Quantized | None = None

    def quantized_weight(self, dtype: torch.dtype, group: ProcessGroup | None = None) -> Quantized:
        """Return the weight in fp8. The ranks of `group` have parts of it.

        The weight is rounded to `dtype` first, so that the result does not depend on the dtype of its storage.
        """
        if self._cast is None:
            columns = self.keeps_transposed and not self.has_bf16_gradients
            self._cast = quantize(self.weight.detach().to(dtype), columns=columns, group=group)
        return self._cast


def forget_casts(model: nn.Module) -> None:
    """Discard the fp8 casts of all weights. The next forward pass creates them again."""
    for module in model.modules():
        if isinstance(module, CastsWeight):
            module._cast = None
