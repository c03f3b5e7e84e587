"""Checks of an engine's training state that need no other run: copies, compute weights and hyper-parameters."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabench.checkpoint.shards import StateShard, num_elements, view
from megabench.engines.base import Engine
from megabench.optim.optimizers import StateKind
from megabench.runtime.rendezvous import gather_objects

Shapes = Mapping[str, tuple[int, ...]]  # by the names of tensors, in the same order on all ranks

_USED = ("lr", "weight_decay", "betas", "eps")  # the values of an optimizer's parameter groups that are compared
_CHUNK = 1 << 20  # number of elements per chunk in the computation of a checksum
# the state with one value per weight; Adafactor's sums have other shapes than the weight
_ELEMENTWISE: tuple[StateKind, ...] = ("weight", "exp_avg", "exp_avg_sq", "variance", "momentum_buffer")
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def state_problems(engine: Engine, shapes: Shapes) -> list[str]:
    """Return a sentence for each kind of state whose copies differ, and one for compute weights that are not current.

    Several ranks may have copies of a tensor, which must be equal to the last bit. Compute weights must be the rounded
    master weights. `shapes` are those of all tensors of the training state. Collective. Call this function between
    `accumulate` and `update`, where the compute weights are those of the last forward pass.
    """
    shards = [shard for shard in engine.training_state().shards if shard.kind in _ELEMENTWISE]
    weights = engine.compute_weights()
    problems = []
    for kind in _agreed({shard.kind for shard in shards}):
        of_kind = [shard for shard in shards if shard.kind == kind]
        owned, copies = (
            _checksums([shard for shard in of_kind if shard.is_owner == is_owner], shapes, engine.device)
            for is_owner in (True, False)
        )
        if names := _unequal(owned, copies, shapes):
            problems.append(f"The copies of the {kind} of {_some(names)} differ between ranks.")
    for dtype in _agreed({shard.values.dtype for shard in weights}):
        masters = [shard for shard in shards if shard.kind == "weight" and shard.is_owner]
        rounded = _checksums(masters, shapes, engine.device, dtype)
        if names := _unequal(rounded, _checksums(weights, shapes, engine.device), shapes):
            problems.append(f"The weights that the forward pass uses are not those of the optimizer: {_some(names)}.")
    return problems


def hyper_parameters_in_use(engine: Engine) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the values that each tensor's update uses, by name, and sentences about ranks with different values.

    The values are read from the parameter groups of torch's optimizer, not from the settings of the run. Collective.
    """
    mine = dict[str, dict[str, Any]]()
    weights = [shard for shard in engine.training_state().shards if shard.kind == "weight"]
    for group in engine.optimizer_groups:
        used = {name: list(group[name]) if name == "betas" else group[name] for name in _USED if name in group}
        # DeepSpeed's default is the integer 0, which is not equal to 0.0 as text
        used = {name: float(value) if isinstance(value, int) else value for name, value in used.items()}
        # a shard may be a part of a tensor that the optimizer updates
        spans = [(one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()) for one in group["params"]]
        for shard in weights:
            at = shard.values.data_ptr()
            if any(first <= at < last for first, last in spans):
                mine |= {block.piece.name: used for block in shard.blocks}
    everyone, other = dict[str, dict[str, Any]](), list[str]()
    for of_rank in gather_objects(mine):
        other += [name for name, used in of_rank.items() if everyone.setdefault(name, used) != used]
    problems = [f"The hyper-parameters of {_some(sorted(set(other)))} differ between ranks."] if other else []
    return everyone, problems


def _agreed(mine: set[Any]) -> list[Any]:
    """Return what any rank has, in the same order on all ranks. Collective."""
    return sorted(set().union(*gather_objects(mine)), key=str)


def _unequal(owned: Tensor, copies: Tensor, shapes: Shapes) -> list[str]:
    """Return the names of the tensors whose copies, summed over all ranks, are no multiple of the owners' tensor."""
    sizes = torch.tensor([math.prod(shape) for shape in shapes.values()])
    (expected, num_owned), (total, num_elements_of_copies) = owned.cpu(), copies.cpu()
    num_copies = num_elements_of_copies // sizes
    # an owner's tensor that is not complete has no checksum to compare with
    is_whole = (num_owned == sizes) & (num_copies > 0) & (num_elements_of_copies % sizes == 0)
    is_wrong = is_whole & (expected * num_copies != total)
    return [name for name, wrong in zip(shapes, is_wrong.tolist(), strict=True) if wrong]


def _checksums(
    shards: Iterable[StateShard], shapes: Shapes, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the checksum and the number of elements of each tensor, summed over the ranks: int64 [2, tensors].

    The values are rounded to `dtype` first. Checksums are modulo 2^64. Collective.
    """
    rows = {name: row for row, name in enumerate(shapes)}
    found = torch.zeros(2, len(shapes), dtype=torch.int64, device=device)
    for shard in shards:
        for block in shard.blocks:
            piece = block.piece
            columns = piece.columns or (0, 1)
            width = shapes[piece.name][1] if piece.columns else 1
            values = view(shard.values, block).reshape(-1, columns[1] - columns[0])
            checksum = _checksum(values, piece.rows[0], columns[0], width, device, dtype or values.dtype)
            found[0, rows[piece.name]] += checksum
            found[1, rows[piece.name]] += num_elements(piece)
    dist.all_reduce(found)
    return found


def _checksum(values: Tensor, top: int, left: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the sum of the elements' bits, each times an odd number that depends on the element's index, int64.

    The values are copied to `device` and rounded to `dtype` in chunks.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    height = max(1, _CHUNK // values.shape[1])
    for first in range(0, len(values), height):
        chunk = values[first : first + height].to(device, dtype).contiguous()
        row = torch.arange(len(chunk), device=device) + top + first
        column = torch.arange(chunk.shape[1], device=device) + left
        factors = (row.unsqueeze(-1) * width + column) * 0x5851F42D4C957F2D | 1
        total += (chunk.view(_INTEGERS[dtype]) * factors).sum()
    return total


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} other tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
