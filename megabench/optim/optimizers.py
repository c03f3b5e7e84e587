"""Optimizers by name. Loads no torch.

A new optimizer is an entry here and a branch of `build_optimizer` in engines/common/transformers_model.py. The megatron
engine has only the optimizers that specs/megatron.py lists. The work class, the state in checkpoints, the planner and
labels follow from the entry.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

StateKind = Literal["weight", "exp_avg", "exp_avg_sq", "row_var", "col_var", "variance", "momentum_buffer"]
NON_NEGATIVE: tuple[StateKind, ...] = ("exp_avg_sq", "row_var", "col_var", "variance")  # means of squares
Shape = tuple[int, ...]
NEWTON_SCHULZ_STEPS = 5  # torch's default


@dataclass(frozen=True)
class Optimizer:
    """What the project needs to know about an optimizer.

    A hidden matrix is a matrix of a layer, as opposed to an embedding or the output layer.

    - `title` is the name in reports, and `implementation` that of torch's code.
    - `state` returns the shapes of the state tensors of a parameter, from the parameter's shape and whether it is a
      hidden matrix. Sums per row or column have a dimension of size 1.
    - `has_betas`: the settings betas and eps apply.
    - `needs_matrices`: each rank must hold whole matrices.
    - `needs_layers`: hidden matrices have an update of their own, so the table of the model must list its layers.
    - `state_bytes` are the bytes of state per parameter, and `update_bytes` the bytes of gradients, weights and
      state that an update reads and writes. Both have a value for hidden matrices and one for other parameters.
    - `products` returns the (m, n, k) of the matrix products that update a hidden matrix of rows × columns.
    """

    title: str
    implementation: str
    state: Callable[[Shape, bool], dict[StateKind, Shape]]
    state_bytes: tuple[float, float]
    update_bytes: tuple[float, float]
    has_betas: bool = False
    needs_matrices: bool = False
    needs_layers: bool = False
    products: Callable[[int, int], list[tuple[int, int, int]]] = lambda rows, columns: []


def _two_moments(shape: Shape, is_hidden: bool) -> dict[StateKind, Shape]:
    return {"exp_avg": shape, "exp_avg_sq": shape}


def _no_state(shape: Shape, is_hidden: bool) -> dict[StateKind, Shape]:
    return {}


def _sums(shape: Shape, is_hidden: bool) -> dict[StateKind, Shape]:
    """Adafactor keeps one sum per row and one per column of a matrix, or of each matrix in a larger tensor."""
    if len(shape) < 2:
        return {"variance": shape}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def _one_moment_of_matrices(shape: Shape, is_hidden: bool) -> dict[StateKind, Shape]:
    return {"momentum_buffer": shape} if is_hidden else _two_moments(shape, is_hidden)


def _newton_schulz(rows: int, columns: int) -> list[tuple[int, int, int]]:
    """Each step multiplies the matrix X by its transpose, the result A by itself, and X by a polynomial of A."""
    short, long = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * [(short, short, long), (short, short, short), (short, long, short)]


# Reads and writes of fp32 values: the gradient (4 bytes), the weight (8), and each moment (8). Adafactor's update is
# priced as AdamW's, because nobody has counted its temporary tensors.
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(
        title="AdamW",
        implementation="torch fused AdamW",
        state=_two_moments,
        state_bytes=(8, 8),
        update_bytes=(28, 28),
        has_betas=True,
    ),
    "sgd": Optimizer(
        title="SGD", implementation="torch SGD", state=_no_state, state_bytes=(0, 0), update_bytes=(12, 12)
    ),
    "adafactor": Optimizer(
        title="Adafactor",
        implementation="torch Adafactor",
        state=_sums,
        state_bytes=(0, 0),
        update_bytes=(28, 28),
        needs_matrices=True,
    ),
    "muon": Optimizer(
        title="Muon",
        implementation="torch Muon, and fused AdamW for embeddings, output layer and vectors",
        state=_one_moment_of_matrices,
        state_bytes=(4, 8),
        update_bytes=(20, 28),
        has_betas=True,
        needs_matrices=True,
        needs_layers=True,
        products=_newton_schulz,
    ),
}


def title_of(name: str) -> str:
    """Return the title of an optimizer, or the name of an optimizer that only another version has."""
    return OPTIMIZERS[name].title if name in OPTIMIZERS else name
