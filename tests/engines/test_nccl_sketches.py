"""On GPUs, the sketches of eight layouts and engines are those of one GPU in bf16 and fp8, but for a planted error."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from megabench.config import ResolvedConfig
from megabench.tensor_parity import TensorParity, compare_files
from tests import distributed
from tests.engines.equivalence import resolve
from tests.engines.test_nccl import BASE, NUM_GPUS
from tests.engines.test_planted_errors import ERRORS as SHARED_ERRORS
from tests.engines.test_planted_errors import train_with_error
from tests.test_tensor_parity import Series, seen_by_losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs"),
]

WORK = BASE | {"optimizer": "adamw", "lr": 3e-4, "eps": 1e-8, "seq_length": 2048, "clip_grad": 1.0}
# for each layout of two ranks, an error that rounding does not hide
ERRORS: dict[str, str] = {
    "tp2": "a norm not summed over tp",
    "tp2, copies": "a norm not summed over tp",
    "pp2": "layers loaded into each other's stage",
    "cp2": "one layer's matrices not summed over cp",
    "dp2": "one layer's matrices not summed over dp",
    "zero3": "a partition not copied from the masters",
    "fsdp": "gradients summed instead of averaged",
    "megatron_fsdp": "two ranks read the same data",
}
EXCHANGES = {"tp2, copies": {"tp_overlap": "copy-engines"}}


def train_both(run: ResolvedConfig, folder: Path, error: str | None) -> list[Series]:
    """Train `run` without and, if an error is named, with this error; losses and gradient norms of each."""
    series = [train_with_error(run, folder / "right", None)]
    if error:
        torch.cuda.empty_cache()
        series.append(train_with_error(run, folder / "wrong", error))
    return series


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Series]]:
    """The sketches and the losses of one GPU, which are made when they are first asked for."""

    @cache
    def of(precision: str) -> tuple[Path, Series]:
        folder = tmp_path_factory.mktemp("reference")
        run = resolve(1, **WORK | {"engine": "ddp", "precision": precision})
        series = distributed.run(train_both, 1, run, folder, None, backend="nccl")[0]
        distributed.close()
        return folder / "right", series[0]

    return of


@pytest.fixture(autouse=True)
def fresh_workers() -> Iterator[None]:
    yield
    distributed.close()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("layout", ERRORS)
def test_only_the_planted_error_differs(
    layout: str, precision: str, reference: Callable[[str], tuple[Path, Series]], tmp_path: Path
) -> None:
    error = SHARED_ERRORS[ERRORS[layout]]
    run = resolve(2, **WORK | error.fields | {"precision": precision} | EXCHANGES.get(layout, {}))
    expected, losses = reference(precision)
    right, wrong = distributed.run(train_both, 2, run, tmp_path, ERRORS[layout], backend="nccl")[0]
    found, with_error = (compare_files(tmp_path / name, expected) for name in ("right", "wrong"))
    print_row(layout, precision, found)
    print_row(f"{layout}, {ERRORS[layout]}", precision, with_error, seen_by_losses(wrong, losses, precision))
    assert found.problems == []
    assert not seen_by_losses(right, losses, precision)
    assert with_error.problems
    if precision == "bf16":  # in fp8, rounding hides the error in some of the tensors
        assert re.search(error.words, "\n".join(with_error.problems)), with_error


def print_row(what: str, precision: str, found: TensorParity, by_losses: bool = False) -> None:
    """Print figures of the table of two H200s in benchmarks/README.md."""
    largest = f"{found.part_of_tolerance:.2g} × | {found.largest}"
    print(f"\n| {what} | {precision} | {largest} | {by_losses} | {' '.join(found.problems)} |")
