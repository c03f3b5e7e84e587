"""The fused output layer and loss against torch's own, which holds all logits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megabench.config import RunConfig
from megabench.engines.common.cross_entropy import linear_cross_entropy
from megabench.engines.common.kernels import adds_output_gradient
from tests import distributed

TOKENS, WIDTH, VOCABULARY = 48, 16, 60


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def expected(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients of hidden and weight, three times over, as a later layer's gradient would have it."""
    hidden, weight, labels = inputs(dtype)
    loss = F.cross_entropy((hidden @ weight.t()).float(), labels)
    (3.0 * loss).backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [None, 48, 17, 1])
def test_one_process(chunk):
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk)
    (3.0 * loss).backward()
    torch.testing.assert_close((loss.detach(), hidden.grad, weight.grad), expected())


@pytest.mark.parametrize("chunk", [None, 17])
def test_adds_the_gradient_of_the_weight(chunk: int | None) -> None:
    hidden, weight, labels = inputs()
    before = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    total = before.clone()
    for _ in range(2):
        loss = linear_cross_entropy(
            hidden, weight.detach(), labels, chunk_tokens=chunk, weight_gradient=total, weight_factor=3.0
        )
        hidden.grad = None
        (3.0 * loss).backward()
    _, of_hidden, of_weight = expected()
    torch.testing.assert_close((hidden.grad, total - before), (of_hidden, 2 * of_weight), rtol=1e-4, atol=1e-5)


def test_bf16():
    hidden, weight, labels = inputs(torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=20)
    (3.0 * loss).backward()
    assert loss.dtype == torch.float32 and weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(
        (loss.detach(), hidden.grad, weight.grad), expected(torch.bfloat16), rtol=0.02, atol=0.02
    )


def test_without_gradients():
    hidden, weight, labels = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(loss, expected()[0])


def cut_over_ranks(num_rows: int, chunk: int | None, label_shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the vocabulary, padded to `num_rows` a rank, cut over the ranks; gradients put together again."""
    hidden, weight, labels = inputs()
    rank, size = dist.get_rank(), dist.get_world_size()
    padded = torch.cat([weight.detach(), torch.full((num_rows * size - VOCABULARY, WIDTH), 9.0)])
    mine = padded[rank * num_rows : (rank + 1) * num_rows].clone().requires_grad_()
    real = max(0, min(VOCABULARY - rank * num_rows, num_rows))
    group = dist.group.WORLD
    labels = labels.roll(label_shift)
    loss = linear_cross_entropy(hidden, mine, labels, group, real, chunk)
    (3.0 * loss).backward()
    dist.all_reduce(hidden.grad)
    rows = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(rows, mine.grad)
    return loss.detach(), hidden.grad, torch.cat(rows)


@pytest.mark.distributed
@pytest.mark.parametrize(("size", "rows", "chunk"), [(2, 30, None), (4, 15, 7), (2, 32, 7), (4, 20, None)])
def test_vocabulary_cut_over_ranks(size, rows, chunk):
    loss, grad_hidden, grad_weight = expected()
    for ours in distributed.run(cut_over_ranks, size, rows, chunk, 0):
        torch.testing.assert_close((ours[0], ours[1], ours[2][:VOCABULARY]), (loss, grad_hidden, grad_weight))
        assert not ours[2][VOCABULARY:].any(), "padding has no gradient"


@pytest.mark.distributed
def test_the_comparison_sees_other_labels():
    ours = distributed.run(cut_over_ranks, 2, 30, None, 1)[0]
    assert not torch.allclose(ours[0], expected()[0], rtol=1e-3)


class Largest(TorchDispatchMode):
    """The largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.numel = max(self.numel, made.numel())
        return made


def test_the_logits_of_all_tokens_are_never_there():
    hidden, weight, labels = inputs()
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=20).backward()
    assert largest.numel <= 20 * VOCABULARY < TOKENS * VOCABULARY
    with Largest() as largest:
        F.cross_entropy(hidden @ weight.t(), labels)
    assert largest.numel == TOKENS * VOCABULARY


@pytest.mark.parametrize(
    ("fields", "expected_answer"),
    [
        ({}, True),
        ({"precision": "bf16"}, True),
        ({"precision": "bf16", "grad_dtype": "bf16"}, False),
        ({"precision": "fp16"}, False),
        ({"model": "qwen3-0.6b"}, False),
        ({"kernels": "reference"}, False),
    ],
)
def test_which_runs_add_the_output_gradient(fields: dict[str, str], expected_answer: bool) -> None:
    """A bf16 sum would be rounded for each chunk, a tied weight has two gradients, and fp16 changes the factor."""
    run = RunConfig.parse({"model": "llama-tiny", "data": "synthetic"} | fields).resolve(1, "cuda")
    assert adds_output_gradient(run) == expected_answer


def test_a_wrong_factor_is_an_error() -> None:
    from megabench.engines.megatron.ends import _WithAddedGradient

    loss = torch.ones((), requires_grad=True)
    weight: Any = torch.nn.Parameter(torch.ones(2))
    (_WithAddedGradient.apply(loss, weight, 0.5) * 0.5).backward()
    assert loss.grad == 0.5 and weight.grad_added_to_main_grad
    with pytest.raises(RuntimeError, match="zero"):
        (_WithAddedGradient.apply(loss, weight, 0.5) * 0.25).backward()
