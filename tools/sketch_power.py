"""Compute the smallest error that sketches find: `python -m tools.sketch_power`.

The noise is the difference of a tensor between two runs of equal work. The tool prints how large an error must be, as a
multiple of the noise, to be found with a probability of 99.9%, if equal runs are to be called different with a
probability of 1e-6 per tensor. A simulation then counts how many errors of this
size are found.

With the sketches of two equal runs, `python -m tools.sketch_power OURS THEIRS` also adds errors of 1 to 100 times the
measured noise to one gradient of step 1, and prints how many are found.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from megabench import sketch
from megabench.errors import UserError
from megabench.models.catalog import get_model
from megabench.models.mapping import hugging_face_shapes
from megabench.tensor_parity import compare_files

NUM_PROJECTIONS = (4, 16, 64)
MULTIPLES = (1, 2, 3, 5, 10, 20, 30, 50, 100)
NUM_HEADS = 32
NUM_PLANTED = 100


def chi_square_quantile(num_projections: int, below: float = 0.0, above: float = 0.0) -> float:
    """Return the mean of that many squared normal numbers which is not reached with the probability `below`.

    For a small probability of larger values, pass this probability as `above` instead.
    """
    half = torch.tensor(num_projections / 2, dtype=torch.float64)
    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        point = half * middle
        is_low = torch.special.gammainc(half, point) < below if below else torch.special.gammaincc(half, point) > above
        low, high = (middle, high) if is_low else (low, middle)
    return middle


def threshold(num_projections: int, false_alarms: float) -> float:
    """Return the estimated difference, as a multiple of the noise, above which two tensors are called different."""
    return math.sqrt(chi_square_quantile(num_projections, above=false_alarms))


def smallest_error(num_projections: int, false_alarms: float, found: float) -> float:
    """Return the error, as a multiple of the noise, that is found with the probability `found`.

    The squared norms of independent errors add up, and the mean square of the projections of a difference is its
    squared norm times a chi-square variable divided by its degrees of freedom.
    """
    of_error = threshold(num_projections, false_alarms) ** 2 / chi_square_quantile(num_projections, below=1 - found)
    return math.sqrt(of_error - 1)


def simulated(num_projections: int, error: float, false_alarms: float, trials: int, seed: int = 0) -> float:
    """Return the part of `trials` in which an error, as a multiple of the noise, is found by a tensor's sketch."""
    generator = torch.Generator().manual_seed(seed)
    num_found, size, limit = 0, 512, threshold(num_projections, false_alarms)
    for start in range(0, trials, 1000):
        count = min(1000, trials - start)
        signs = torch.randint(0, 2, (size, num_projections), generator=generator) * 2.0 - 1.0
        noise, wrong = torch.randn(2, count, size, generator=generator)
        difference = noise / math.sqrt(size) + error * wrong / wrong.norm(dim=1, keepdim=True)
        estimated = (difference @ signs).square().mean(1).sqrt()
        num_found += int((estimated > limit).sum())
    return num_found / trials


def power_table(noise: float, false_alarms: float, found: float, trials: int) -> str:
    """Return a Markdown table of the smallest errors, and of the noise at which an error of 5% of a head is found.

    All elements of the tensor have the same size. The tensor then shows an error of one of 32 heads divided by √32,
    and the block of rows of the head shows it as it is.
    """
    columns = ("Projections", "Smallest error, × noise", "Smallest error", "Found in simulation")
    of_head = ("Largest noise for 5% of a head, whole tensor", "Largest noise for 5% of a head, block of rows")
    rows = _head(*columns, *of_head)
    for number in NUM_PROJECTIONS:
        error = smallest_error(number, false_alarms, found)
        # one tensor has 64 blocks, and all of them together may raise as many false alarms as the tensor
        in_block = smallest_error(number, false_alarms / (2 * sketch.NUM_BLOCKS), found)
        share = simulated(number, error, false_alarms, trials)
        of_noise = f"{error:.2g} | {error * noise:.2g} | {share:.2%}"
        rows.append(f"| {number} | {of_noise} | {0.05 / math.sqrt(NUM_HEADS) / error:.2g} | {0.05 / in_block:.2g} |")
    return "\n".join(rows)


def measured_table(ours: Path, theirs: Path, name: str, false_alarms: float) -> str:
    """Return a Markdown table of random errors in one gradient of step 1, and of the part that is found.

    A sketch is linear, so the sketch of a gradient with an error is the sum of the sketches of both. `megabench parity`
    compares the run with the first error.
    """
    (mine, facts), (expected, _) = sketch.read(ours), sketch.read(theirs)
    shape = _shape(facts, name)
    key = ("gradient", 1, name)
    noise = mine[key] - expected[key]
    size = sketch.estimated_norm(noise)
    errors = []
    for seed in range(NUM_PLANTED):
        wrong = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        errors.append(sketch.sketch(name, shape, wrong * (size / wrong.norm())))
    limits = {number: threshold(number, false_alarms) * size for number in NUM_PROJECTIONS}
    rows = [f"Noise of {name}: {size / sketch.estimated_norm(expected[key]):.2g} of its norm\n"]
    rows += _head("Error, × noise", *(f"{number} projections" for number in NUM_PROJECTIONS), "megabench parity")
    with TemporaryDirectory() as folder:
        for multiple in MULTIPLES:
            cells = []
            for number, limit in limits.items():
                num_found = sum(_estimate(noise + multiple * one, number) > limit for one in errors)
                cells.append(f"{num_found / NUM_PLANTED:.0%}")
            path = Path(folder) / f"{multiple}.safetensors"
            sketch.write(path, mine | {key: mine[key] + multiple * errors[0]}, precision=facts["precision"])
            cells.append("found" if any(name in text for text in compare_files(path, theirs).problems) else "not found")
            rows.append(f"| {multiple} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _head(*columns: str) -> list[str]:
    """Return the first two rows of a Markdown table."""
    return ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]


def _estimate(difference: Tensor, num_projections: int) -> float:
    return float(difference[0, :, 1 : 1 + num_projections].sum(0).square().mean().sqrt())


def _shape(facts: Mapping[str, str], name: str) -> tuple[int, ...]:
    shapes = hugging_face_shapes(get_model(facts["model"]))
    if name not in shapes:
        raise UserError(f"{facts['model']} has no tensor {name}. Use --tensor with one of its Hugging Face names.")
    return shapes[name]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Compute the smallest error that sketches find.")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="the sketches of two runs of equal work")
    parser.add_argument("--noise", type=float, default=1e-6, help="relative difference of equal runs (default: 1e-6)")
    parser.add_argument("--false-alarms", type=float, default=1e-6, help="probability per tensor (default: 1e-6)")
    parser.add_argument("--found", type=float, default=0.999, help="probability of finding an error (default: 0.999)")
    parser.add_argument("--trials", type=int, default=100_000, help="simulated errors (default: 100000)")
    parser.add_argument("--tensor", default="model.layers.1.mlp.up_proj.weight", help="the gradient that gets errors")
    given = parser.parse_args(arguments)
    if len(given.files) not in (0, 2):
        parser.error(f"expected the sketches of two runs, got {len(given.files)} files")
    print(power_table(given.noise, given.false_alarms, given.found, given.trials))
    if given.files:
        print()
        print(measured_table(given.files[0], given.files[1], given.tensor, given.false_alarms))


if __name__ == "__main__":
    main()
