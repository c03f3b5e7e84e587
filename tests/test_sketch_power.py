"""tools/sketch_power.py computes the errors that sketches find."""

from pathlib import Path

import pytest
import torch

from megabench import sketch
from megabench.errors import UserError
from tools.sketch_power import MULTIPLES, chi_square_quantile, main, simulated, smallest_error

NAME = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("num_projections", "below", "above", "expected"),
    # quantiles of chi-square tables, divided by the degrees of freedom
    [
        (4, 0.001, 0.0, 0.0908 / 4),
        (4, 0.0, 0.001, 18.467 / 4),
        (16, 0.0, 0.001, 39.252 / 16),
        (60, 0.001, 0, 31.738 / 60),
    ],
)
def test_quantiles(num_projections: int, below: float, above: float, expected: float) -> None:
    assert chi_square_quantile(num_projections, below, above) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("num_projections", "error"), [(4, 19.2), (16, 3.7), (64, 1.7)])
def test_the_smallest_error_is_found_as_often_as_asked(num_projections: int, error: float) -> None:
    found = smallest_error(num_projections, false_alarms=1e-6, found=0.999)
    assert found == pytest.approx(error, rel=0.02)
    assert simulated(num_projections, found, 1e-6, trials=4000) == pytest.approx(0.999, abs=0.003)
    assert simulated(num_projections, found / 4, 1e-6, trials=1000) < 0.9


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The sketches of two runs of llama-tiny with a noise of 1e-6 in one gradient."""
    torch.manual_seed(1)
    gradient, noise = torch.randn(128), 1e-6 * torch.randn(128)
    paths = [tmp_path / name for name in ("ours", "theirs")]
    for path, values in zip(paths, (gradient + noise, gradient), strict=True):
        sketches = {("gradient", 1, NAME): sketch.sketch(NAME, (128,), values)}
        sketch.write(path, sketches, precision="fp32", model="llama-tiny")
    return [str(path) for path in paths]


def test_planted_errors_are_found(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*files, "--tensor", NAME, "--trials", "100"])
    rows = {row.split(" | ")[0]: row for row in capsys.readouterr().out.splitlines() if row.startswith("| ")}
    assert rows["| 1"].endswith("| not found |")
    assert rows["| 100"] == "| 100 | 100% | 100% | 100% | found |"
    assert {f"| {multiple}" for multiple in MULTIPLES} < rows.keys()


def test_arguments_that_do_not_fit(files: list[str]) -> None:
    with pytest.raises(UserError, match="--tensor"):
        main([*files, "--tensor", "lm_head", "--trials", "100"])
    with pytest.raises(SystemExit):
        main(files[:1])
