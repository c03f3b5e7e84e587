"""Detection of non-finite values (NaN or infinity) in training state, which make a checkpoint unusable."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megabench.checkpoint.shards import StateShard

_NAMED = 3  # maximum number of tensors that an error message names
_PART = 1 << 24  # the number of non-finite elements is counted in chunks of this many elements


def is_finite(values: Sequence[Tensor]) -> list[bool]:
    """Return, for each tensor, whether all elements of the tensor are finite.

    The function reads each tensor once, allocates no buffer of the size of a tensor, and synchronizes once per device.
    """
    answers = [True] * len(values)
    for device in {tensor.device for tensor in values}:
        indices = [i for i, tensor in enumerate(values) if tensor.device == device and tensor.numel()]
        if indices:
            extremes = torch.stack([_extreme(values[i]) for i in indices])
            for i, answer in zip(indices, extremes.isfinite().tolist(), strict=True):
                answers[i] = answer
    return answers


def _extreme(values: Tensor) -> Tensor:
    """Return a scalar that is finite if and only if all values are finite."""
    if values.is_cuda:
        return torch.linalg.vector_norm(values, float("inf")).float()
    low, high = values.aminmax()  # aminmax is 15 times as fast as vector_norm on CPU
    return low.float() if not low.isfinite() else high.float()


def count_non_finite(shards: Iterable[StateShard]) -> Counter[str]:
    """Count the non-finite elements in the shards that this rank saves, by kind and tensor.

    Example: `{"weight model.norm.weight": 3}`.
    """
    owned = [shard for shard in shards if shard.is_owner and shard.blocks]
    counts: Counter[str] = Counter()
    for shard, finite in zip(owned, is_finite([shard.values for shard in owned]), strict=True):
        if not finite:
            counts[f"{shard.kind} {shard.blocks[0].piece.name}"] += num_non_finite(shard.values)
    return counts


def num_non_finite(values: Tensor) -> int:
    """Count the non-finite elements in chunks, because a mask of the whole tensor may not fit into GPU memory."""
    return sum(int(part.isfinite().logical_not().sum()) for part in values.flatten().split(_PART))


def describe_non_finite(counts: Mapping[str, int]) -> str:
    """Return a sentence with the number of non-finite values on all ranks and the names of the first tensors."""
    named = ", ".join(f"{name} ({number:,})" for name, number in list(counts.items())[:_NAMED])
    more = f" and {len(counts) - _NAMED} more tensors" if len(counts) > _NAMED else ""
    total = sum(counts.values())
    values = "1 value of the training state is" if total == 1 else f"{total:,} values of the training state are"
    return f"{values} NaN or infinite: {named}{more}"
