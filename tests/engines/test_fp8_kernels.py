"""The fp8 kernels of GPUs give the bits of the CPU path, and the products of cuBLASLt are those of fp32."""

import pytest
import torch
from torch import Tensor

from megabench.engines.common import fp8, fp8_format

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="fp8 needs a Hopper GPU"
    ),
]

SIZES = [(16, 16), (48, 272), (192, 4096), (1008, 14336)]  # no multiples of a kernel's tile, but for the columns


def random(*sizes: int, spread: float = 3.0) -> Tensor:
    """Values in bf16 whose magnitudes differ by many powers of two, as those of gradients do."""
    generator = torch.Generator().manual_seed(sum(sizes))
    magnitudes = torch.exp(spread * torch.randn(sizes, generator=generator))
    return (torch.randn(sizes, generator=generator) * magnitudes).bfloat16()


def bits(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.cpu().view(torch.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_quantizes_as_on_cpu(size: tuple[int, int]) -> None:
    matrix = random(*size)
    expected, found = fp8.quantize(matrix), fp8.quantize(matrix.cuda())
    assert torch.equal(bits(found.rows), bits(expected.rows))
    assert torch.equal(bits(found.columns), bits(expected.columns))
    assert found.scale.item() == expected.scale.item()


def test_scales_as_on_cpu() -> None:
    """Every mantissa that bf16 has, because an approximate division would be wrong in few places."""
    zeros = torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16)
    for amax in (1 + torch.arange(128) / 128) * 2.0**-20:
        assert fp8.quantize(zeros, amax=amax.cuda()).scale.item() == 1 / fp8_format.quantization_scale(amax)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_special_values_quantize_as_on_cpu(value: float) -> None:
    matrix = random(64, 256)
    matrix[3, 7] = value
    expected, found = fp8.quantize(matrix), fp8.quantize(matrix.cuda())
    assert torch.equal(found.rows.cpu().float().isnan(), expected.rows.float().isnan())
    assert fp8.quantize(torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16)).rows.float().abs().max() == 0


def test_transposes() -> None:
    matrix = fp8.quantize(random(208, 1040).cuda(), columns=False).rows
    assert torch.equal(bits(fp8.transposed(matrix)), bits(matrix).t())


def operands(rows: int, columns: int, inner: int) -> list[Tensor]:
    left, right = fp8.quantize(random(rows, inner, spread=0)), fp8.quantize(random(columns, inner, spread=0))
    return [left.rows, left.scale, right.rows, right.scale]


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_multiplies_as_on_cpu(dtype: torch.dtype, is_fast: bool) -> None:
    a, a_scale, b, b_scale = operands(256, 512, 4096)
    expected = fp8.product(a, a_scale, b, b_scale, torch.float32)
    on_gpu = fp8.product(a.cuda(), a_scale.cuda(), b.cuda(), b_scale.cuda(), dtype, is_fast=is_fast)
    found = on_gpu.cpu().float()
    # fast accumulation keeps 14 bits of each partial sum
    assert torch.dist(found, expected) / expected.norm() < (1e-2 if is_fast or dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("has_nvmath", [False, True])
def test_sums_over_many_tokens_are_not_too_small(has_nvmath: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All terms of the sum have the same sign, like many terms of a weight gradient. Fast accumulation loses a part."""
    if has_nvmath:
        pytest.importorskip("nvmath")
    monkeypatch.setattr(fp8, "has_nvmath", lambda: has_nvmath)
    left, right = (fp8.quantize(random(256, 32768, spread=0).abs().cuda(), columns=False) for _ in range(2))
    expected = left.rows.double() @ right.rows.double().t() * (left.scale * right.scale)
    total = torch.zeros(256, 256, device="cuda")
    fp8.add_product(total, left.rows, left.scale, right.rows, right.scale)
    # the tensor cores of an H200 lose 6e-4 of any sum without fast accumulation, and 0.17 of this sum with it
    assert abs(total.double().mean() / expected.mean() - 1) < 1e-3
    fast = fp8.product(left.rows, left.scale, right.rows, right.scale, torch.float32, is_fast=True)
    assert fast.double().mean() / expected.mean() < 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_nvmath", [False, True])
def test_adds_products_as_on_cpu(dtype: torch.dtype, has_nvmath: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes in turn, each with new operands, scales and sums in each of three rounds."""
    if has_nvmath:
        pytest.importorskip("nvmath")
    monkeypatch.setattr(fp8, "has_nvmath", lambda: has_nvmath)
    for round_ in range(3):
        for rows, columns, inner in [(256, 512, 4096), (1024, 256, 2048)]:
            on_cpu = operands(rows, columns, inner)
            on_cpu[1] = on_cpu[1] * 2.0**round_
            expected = random(rows, columns, spread=0).to(dtype) * 100
            found = expected.cuda()
            fp8.add_product(found, *(tensor.cuda() for tensor in on_cpu))
            started = expected.clone()
            fp8.add_product(expected, *on_cpu)
            difference = torch.dist(found.cpu().float(), expected.float())
            assert difference / torch.dist(expected.float(), started.float()) < 2e-2  # the sum is rounded to its dtype


def test_reads_strided_input() -> None:
    matrix = random(64, 128).cuda()
    assert torch.equal(bits(fp8.quantize(matrix.t()).rows), bits(fp8.quantize(matrix).columns))
