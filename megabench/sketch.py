"""Sketches of tensors, which compare the tensors of two training runs without gathering or storing them.

A sketch of a matrix [R, C] holds, for 32 blocks of rows and 32 blocks of columns, the squared norm and 64 projections:
sums of the elements with signs that are hashed from the tensor's name and the element's index. Sketches are linear: the
sum of the sketches of disjoint parts is the sketch of the tensor, whatever ranks hold the parts. The mean square of the
64 differences between the projections of two tensors estimates the squared norm of their difference, with a standard
error of 18%.

Any trainer can use this module. It needs only torch and safetensors; tensors on CUDA GPUs also need Triton and
sketch_kernel.py, which is beside this file. Each rank adds up the sketches of the parts that it holds. An element that
several ranks hold is counted on one of them. Then the sketches are summed over the ranks, and one rank writes the
file::

    sketches = {("gradient", 1, name): sketch(name, shape, part, start) for name, shape, part, start in my_parts}
    for values in sketches.values():  # in the same order on all ranks
        torch.distributed.all_reduce(values)
    write("sketches.safetensors", sketches, precision="bf16")

`megabench parity A B` compares two files.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

NUM_BLOCKS = 32
NUM_SIGNS = 64
_CHUNK = 1 << 14  # number of elements that a CPU processes at a time, so that their signs fit in the cache
_COPIED = 1 << 26  # number of elements that are copied to a GPU at a time
_VERSION = "1"
_FLOOR = 1e-3

# the kind of a tensor ("weight", "gradient", "exp_avg_sq" or "update"), the number of optimizer steps before the tensor
# was read, and the Hugging Face name of the tensor
Key = tuple[str, int, str]


class SketchError(ValueError):
    """Raised if a file of sketches cannot be read."""


def sketch(
    name: str,
    shape: tuple[int, ...],
    part: Tensor,
    start: tuple[int, ...] = (0, 0),
    device: torch.device | None = None,
) -> Tensor:
    """Return the sketch of a rectangular part of a tensor, fp64 [2, 32, 65] on `device`.

    The tensor is divided once into 32 blocks of rows and once into 32 blocks of columns. The sketch holds the squared
    norm and 64 projections of each block. A vector has no blocks of columns.

    Args:
        name: The Hugging Face name of the tensor, from which the signs are hashed.
        shape: The shape of the whole tensor, 1 or 2 dimensions.
        part: The elements, with as many dimensions as `shape`.
        start: The index of the part's first element in the whole tensor.
        device: The CPU or CUDA GPU that computes the sketch, to which the part is copied in chunks. By default that of
            the part.
    """
    rows, columns = (*shape, 1)[:2]
    top, left = (*start, 0)[:2]
    part = part.detach().reshape(part.shape[0], -1)
    device = device or part.device
    if device.type == "cuda":
        cells = _cells_on_gpu(name, (rows, columns), part, (top, left), device)
        by_columns = cells.sum(0) if len(shape) == 2 else torch.zeros_like(cells[0])
        return torch.stack([cells.sum(1), by_columns])
    found = torch.zeros(2, NUM_BLOCKS, 1 + NUM_SIGNS, dtype=torch.float64)
    width = min(part.shape[1], _CHUNK)
    height = _CHUNK // width
    for first_column in range(0, part.shape[1], width):
        for first_row in range(0, part.shape[0], height):
            values = part[first_row : first_row + height, first_column : first_column + width].to(device, torch.float32)
            row = torch.arange(len(values)) + top + first_row
            column = torch.arange(values.shape[1]) + left + first_column
            terms = torch.empty(*values.shape, 1 + NUM_SIGNS)
            torch.square(values, out=terms[..., 0])
            torch.mul(_signs(name, row.unsqueeze(-1) * columns + column), values.unsqueeze(-1), out=terms[..., 1:])
            found[0].index_add_(0, row * NUM_BLOCKS // rows, terms.sum(1).double())
            if len(shape) == 2:
                found[1].index_add_(0, column * NUM_BLOCKS // columns, terms.sum(0).double())
    return found


def _cells_on_gpu(
    name: str, shape: tuple[int, int], part: Tensor, start: tuple[int, int], device: torch.device
) -> Tensor:
    """Return the squared norm and 64 projections of each block of rows in each block of columns, fp64 [32, 32, 65].

    A part in the memory of the host or of another GPU is copied in chunks of rows.
    """
    from megabench.sketch_kernel import sums_of_cells  # only GPU builds of torch include Triton

    height = max(1, _COPIED // part.shape[1]) if part.device != device else len(part)
    found = torch.zeros(NUM_BLOCKS, NUM_BLOCKS, 1 + NUM_SIGNS, dtype=torch.float64, device=device)
    for first in range(0, len(part), height):
        rows = part[first : first + height].to(device)
        found += sums_of_cells(rows, shape, (start[0] + first, start[1]), _seed(name), NUM_BLOCKS)
    return found


@cache
def _signs_of_bytes() -> Tensor:
    """Return the signs that each byte stands for, [256, 8]."""
    bits = torch.arange(256).unsqueeze(-1) >> torch.arange(8)
    return 1.0 - 2.0 * (bits & 1)


def _signs(name: str, index: Tensor) -> Tensor:
    """Return 64 signs (1 or -1) for each element, fp32 [*index.shape, 64]: one for each bit of a hash (SplitMix64)."""
    mixed = index * _signed(0x9E3779B97F4A7C15) + _seed(name)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    mixed = mixed ^ _shifted(mixed, 31)
    return _signs_of_bytes()[mixed.view(torch.uint8).int()].view(*index.shape, NUM_SIGNS)


def _seed(name: str) -> int:
    """Return a signed integer of 64 bits, from which the signs of a tensor are hashed."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _signed(number: int) -> int:
    """Return the int64 with the bits of a 64-bit number."""
    return number - (1 << 64) if number >> 63 else number


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros, which torch's shift of int64 does not."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def norm(one: Tensor) -> float:
    """Return the L2 norm of a sketched tensor. A difference of sketches has no norm; see `estimated_norm`."""
    return float(one[0, :, 0].sum().clamp(min=0).sqrt())


def estimated_norm(one: Tensor) -> float:
    """Return the L2 norm of a sketched tensor from its projections, with a standard error of 9%."""
    return float(one[0, :, 1:].sum(0).square().mean().sqrt())


def block_norms(one: Tensor) -> Tensor:
    """Return the estimated L2 norms of the blocks of rows and columns, [2, 32]."""
    return one[:, :, 1:].square().mean(-1).sqrt()


def common_factor(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the factor f for which f · `theirs` is nearest to `ours`: the median over the tensors.

    A gradient that is not divided by the number of replicas, or that is clipped otherwise, is wrong by a factor.
    """
    factors = []
    for name, one in ours.items():
        mine, other = (sketches[0, :, 1:].sum(0) for sketches in (one, theirs[name]))
        if square := float(other @ other):
            factors.append(float(mine @ other) / square)
    return float(torch.tensor(factors, dtype=torch.float64).median()) if factors else 1.0


def gradients(after: Tensor, before: Tensor | None, beta1: float, clip_factor: float) -> Tensor:
    """Return the sketch of a gradient before clipping, from Adam's first moment after and before the step.

    The squared norms are right only for the first step, where `before` is None; the projections are always right.
    """
    found = after.clone()
    found[:, :, 1:] -= 0 if before is None else beta1 * before[:, :, 1:]
    scale = 1 / ((1 - beta1) * clip_factor)
    found[:, :, 0] *= scale**2
    found[:, :, 1:] *= scale
    return found


def write(path: Path, sketches: Mapping[Key, Tensor], **facts: str) -> None:
    """Write sketches in fp32, with some facts about the run, such as `precision`."""
    tensors = {f"{kind}:{step}:{name}": values.cpu().float() for (kind, step, name), values in sketches.items()}
    safetensors.torch.save_file(tensors, path, metadata={"version": _VERSION, **facts})


def read(path: Path) -> tuple[dict[Key, Tensor], dict[str, str]]:
    """Return the sketches and the facts of a file. Raises SketchError if the file is not one that `write` wrote."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        sketches = {}
        for text, values in tensors.items():
            kind, step, name = text.split(":", 2)
            sketches[kind, int(step), name] = values.double()
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise SketchError(f"{path} is not a file of sketches: {error}") from None
    if facts.get("version") != _VERSION or any(one.shape != (2, NUM_BLOCKS, 1 + NUM_SIGNS) for one in tensors.values()):
        raise SketchError(f"{path} was written by another version of megabench; write it again with this one")
    return sketches, facts


@dataclass(frozen=True)
class Difference:
    """The difference between a tensor of one run and the same tensor of another run.

    `relative` is the norm of the difference divided by the norm of the other tensor, and `block` is the axis and number
    of the block that differs most, of NUM_BLOCKS blocks, by `of_block` of the norm of a block.
    """

    kind: str
    step: int
    name: str
    relative: float
    block: tuple[str, int]
    of_block: float
    is_vector: bool

    @property
    def judged(self) -> float:
        """The number that is compared with a tolerance.

        The blocks of a vector have few elements, of which rounding may change one by its whole size.
        """
        return self.relative if self.is_vector else max(self.relative, self.of_block)


def smallest_norm(tensors: Mapping[str, Tensor], part: float = _FLOOR) -> float:
    """Return `part` of the root mean square of the tensors' norms. Smaller gradients count as rounding."""
    return part * math.sqrt(sum(estimated_norm(one) ** 2 for one in tensors.values()) / max(1, len(tensors)))


def compare(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], kind: str, step: int) -> list[Difference]:
    """Return the difference of each tensor, the largest first. Both mappings have the same names.

    Some gradients are zero in theory, such as those of the keys' biases, and consist of rounding. So tensors count as
    at least `_FLOOR` times as large as the root mean square of all tensors (squared for second moments), and blocks as
    at least as large as the root mean square of the tensor's blocks.
    """
    floor = smallest_norm(theirs, _FLOOR**2 if kind == "exp_avg_sq" else _FLOOR)
    found = []
    for name, theirs_one in theirs.items():
        difference = ours[name] - theirs_one
        size = max(estimated_norm(theirs_one), floor, torch.finfo(torch.float64).tiny)
        of_blocks = block_norms(difference) / block_norms(theirs_one).clamp(min=size / math.sqrt(NUM_BLOCKS))
        axis, block = divmod(int(of_blocks.argmax()), NUM_BLOCKS)
        relative = estimated_norm(difference) / size
        place = ("rows", "columns")[axis], block
        is_vector = not theirs_one[1].any() and not ours[name][1].any()
        found.append(Difference(kind, step, name, relative, place, float(of_blocks.max()), is_vector))
    return sorted(found, key=lambda one: -one.judged)
