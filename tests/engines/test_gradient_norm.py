"""The gradient norm of large tensors on CPU, where torch's fp32 norm is inexact."""

import pytest
import torch

from megabench.engines.common.optim import squared_norm


def test_the_norm_of_many_elements_is_exact() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(4_000_000), torch.randn(3)]
    exact = torch.cat(grads).double().square().sum().item()
    assert squared_norm(grads).item() == pytest.approx(exact, rel=1e-9)
    assert torch.nn.utils.get_total_norm(grads).item() ** 2 != pytest.approx(exact, rel=1e-6), "torch's fp32 norm"


def test_no_gradients_have_no_norm() -> None:
    assert squared_norm([]).item() == 0


def test_a_norm_that_is_not_finite_is_seen() -> None:
    assert squared_norm([torch.tensor([1.0, float("inf")])]).item() == float("inf")
