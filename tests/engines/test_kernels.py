"""Every kernel that "auto" takes on a GPU against plain fp32 arithmetic, forward and backward, on random inputs of the
sizes of the catalogue's models."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megabench.engines.common import norm
from megabench.engines.common.cross_entropy import linear_cross_entropy
from megabench.engines.common.fp8 import largest_value
from megabench.models.catalog import CATALOG
from megabench.models.shape import ModelShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels of GPUs need one"),
]

SHAPES = [shape for name, shape in CATALOG.items() if not name.endswith("-tiny")]
BLOOM_SHAPES = [shape for shape in SHAPES if shape.family == "bloom"]
BATCH, SEQUENCE = 2, 192  # no power of two, no multiple of a kernel's block
TOLERANCE = 8e-3  # two roundings to bf16, 2^-8 each, over values of about the same size


def random(*sizes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(sizes))
    return torch.randn(sizes, generator=generator, device="cuda").to(torch.bfloat16)


def assert_as_fp32(
    kernel: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    tolerance: float = TOLERANCE,
) -> None:
    """The output and every input's gradient of `kernel` in bf16 are those of `reference` in fp32, by relative norm."""
    results = []
    for function, dtype in ((kernel, torch.bfloat16), (reference, torch.float32)):
        mine = [tensor.clone().to(dtype).requires_grad_() for tensor in inputs]
        output = function(*mine)
        gradient = random(*output.shape, seed=99) if output.ndim else torch.ones((), device="cuda")
        output.backward(gradient.to(output.dtype))
        results.append([output.detach(), *(tensor.grad for tensor in mine)])
    for number, (ours, theirs) in enumerate(zip(*results, strict=True)):
        error = (torch.dist(ours.float(), theirs.float()) / theirs.float().norm()).item()
        assert error < tolerance, f"{'output' if number == 0 else f'gradient of input {number}'} is off by {error:.2g}"


def of(shapes: Sequence[ModelShape], *fields: str) -> list[tuple[int, ...]]:
    """The distinct sizes among `shapes`."""
    return sorted({tuple(getattr(shape, field) for field in fields) for shape in shapes})


def rms_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-5) * weight


@pytest.mark.parametrize("width", [width for sizes in of(SHAPES, "hidden_size", "head_dim") for width in sizes])
def test_rms_norm(width: int) -> None:
    from liger_kernel.transformers import LigerRMSNorm

    def liger(hidden: Tensor, weight: Tensor) -> Tensor:
        norm = LigerRMSNorm(width, eps=1e-5).cuda()
        del norm.weight
        norm.weight = weight
        return norm(hidden)

    inputs = (random(BATCH, SEQUENCE, width), 1 + random(width))
    assert_as_fp32(liger, rms_norm, inputs)
    assert_as_fp32(lambda hidden, weight: F.rms_norm(hidden, weight.shape, weight, 1e-5), rms_norm, inputs)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


@pytest.mark.parametrize("width", [width for sizes in of(SHAPES, "hidden_size", "head_dim") for width in sizes])
def test_rms_norm_of_parallel_blocks(width: int) -> None:
    ours = partial(norm.rms_norm, eps=1e-5)
    assert_as_fp32(ours, rms_norm, (random(SEQUENCE, BATCH, width), random(width)))


@pytest.mark.parametrize("width", [width for (width,) in of(SHAPES, "hidden_size")])
def test_norm_of_a_sum(width: int) -> None:
    def ours(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
        return torch.stack(norm.norm_of_sum(left, right, weight, 1e-5))

    def reference(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
        return torch.stack([left + right, rms_norm(left + right, weight)])

    inputs = random(SEQUENCE, BATCH, width), random(SEQUENCE, BATCH, width, seed=1), random(width)
    assert_as_fp32(ours, reference, inputs)


def test_norms_find_the_largest_values() -> None:
    left, right, weight = (random(*sizes).requires_grad_() for sizes in ((48, 2, 4096), (48, 2, 4096), (4096,)))
    total, normed = norm.norm_of_sum(left, right, weight, 1e-5)
    found: list[Tensor] = []
    left.register_hook(lambda grad: found.extend((largest_value(grad), grad.abs().max())))
    torch.autograd.backward([total, normed], [random(48, 2, 4096, seed=2), random(48, 2, 4096, seed=3)])
    alone = norm.rms_norm(left, weight, 1e-5)
    for tensor in (normed, alone):
        assert hasattr(tensor, "_megabench_amax")
        assert largest_value(tensor).item() == tensor.abs().max().item()
    assert found[0].item() == found[1].item()


@pytest.mark.parametrize(("heads", "kv_heads", "width"), of(SHAPES, "num_heads", "num_kv_heads", "head_dim"))
def test_rotary_embedding(heads: int, kv_heads: int, width: int) -> None:
    from liger_kernel.transformers import liger_rotary_pos_emb

    frequencies = 500_000.0 ** (-torch.arange(0, width, 2, device="cuda") / width)
    angles = torch.arange(SEQUENCE, device="cuda")[:, None] * frequencies
    cos, sin = (function(torch.cat([angles, angles], dim=-1))[None] for function in (torch.cos, torch.sin))

    def both(turn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        return lambda query, key: torch.cat(turn(query, key), dim=1)

    liger = both(lambda query, key: liger_rotary_pos_emb(query, key, cos.bfloat16(), sin.bfloat16()))
    reference = both(lambda query, key: (rotate(query, cos, sin), rotate(key, cos, sin)))
    assert_as_fp32(liger, reference, (random(BATCH, heads, SEQUENCE, width), random(BATCH, kv_heads, SEQUENCE, width)))


@pytest.mark.parametrize(("heads", "kv_heads", "width"), of(SHAPES, "num_heads", "num_kv_heads", "head_dim"))
def test_rotary_embedding_of_parallel_blocks(heads: int, kv_heads: int, width: int) -> None:
    from megabench.engines.common.kernels import fused
    from megabench.engines.megatron.blocks import rotate_heads

    torch.compiler.reset()
    frequencies = 500_000.0 ** (-torch.arange(0, width, 2, device="cuda") / width)
    angles = torch.arange(SEQUENCE, device="cuda")[:, None] * frequencies
    cos, sin = (
        function(torch.cat([angles, angles], dim=-1))[:, None, None, None] for function in (torch.cos, torch.sin)
    )

    def ours(states: Tensor) -> Tensor:
        return torch.cat(fused(rotate_heads, states)(states, cos, sin), dim=3)

    def reference(states: Tensor) -> Tensor:
        return torch.cat([rotate(states[..., :-1, :], cos, sin), states[..., -1:, :]], dim=3)

    assert_as_fp32(ours, reference, (random(SEQUENCE, BATCH, kv_heads, heads // kv_heads + 2, width),))


@pytest.mark.parametrize(("width", "wide"), of(SHAPES, "hidden_size", "ffn_size"))
def test_weight_gradients_are_summed_up(width: int, wide: int) -> None:
    """Two micro-batches, onto what is there already; no rounding but that of fp32."""
    from megabench.engines.common.kernels import accumulate

    total = random(wide, width, seed=3).float()
    expected = total.double()
    for seed in (0, 1):
        grads, inputs = random(BATCH * SEQUENCE, wide, seed=seed), random(BATCH * SEQUENCE, width, seed=seed + 7)
        accumulate(total, grads, inputs)
        expected += grads.double().t() @ inputs.double()
    assert (torch.dist(total.double(), expected) / expected.norm()).item() < 1e-5


@pytest.mark.parametrize("width", [width for (width,) in of(SHAPES, "ffn_size")])
def test_swiglu(width: int) -> None:
    from liger_kernel.ops import LigerSiLUMulFunction

    from megabench.engines.common.swiglu import swiglu

    def parallel(gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(torch.cat([gate, up], dim=-1))

    def liger(gate: Tensor, up: Tensor) -> Tensor:
        return LigerSiLUMulFunction.apply(gate, up, 1.0, 1.0)

    inputs = (random(BATCH, SEQUENCE, width), random(BATCH, SEQUENCE, width, seed=1))
    for kernel in (liger, parallel, swiglu):
        assert_as_fp32(kernel, lambda gate, up: F.silu(gate) * up, inputs)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), of(SHAPES, "num_heads", "num_kv_heads", "head_dim"))
def test_attention(heads: int, kv_heads: int, width: int) -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attention(query, key, value)

    sizes = (BATCH, kv_heads, SEQUENCE, width)
    inputs = (random(BATCH, heads, SEQUENCE, width), random(*sizes, seed=1), random(*sizes, seed=2))
    assert_as_fp32(attention, reference, inputs)


@pytest.mark.parametrize(("heads", "width"), of(BLOOM_SHAPES, "num_heads", "head_dim"))
def test_attention_with_alibi(heads: int, width: int) -> None:
    from megabench.engines.common.transformers_blocks import alibi_attention

    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device="cuda") / heads)
    alibi = (slopes[:, None] * torch.arange(SEQUENCE, device="cuda")).bfloat16().expand(BATCH, -1, -1)

    def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.transpose(-1, -2) * width**-0.5 + alibi[:, :, None].float()
        later = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda").triu(1)
        return scores.masked_fill(later, float("-inf")).softmax(-1) @ value

    sizes = (BATCH, heads, SEQUENCE, width)
    inputs = (random(*sizes), random(*sizes, seed=1), random(*sizes, seed=2))
    assert_as_fp32(lambda query, key, value: alibi_attention(query, key, value, alibi), reference, inputs)


@pytest.mark.parametrize("width", [4 * width for (width,) in of(BLOOM_SHAPES, "hidden_size")])
def test_bloom_gelu(width: int) -> None:
    from megabench.engines.common.transformers_blocks import FusedBloomGelu

    def reference(states: Tensor) -> Tensor:
        return states * 0.5 * (1 + torch.tanh(0.79788456 * states * (1 + 0.044715 * states * states)))

    assert_as_fp32(FusedBloomGelu(), reference, (random(BATCH, SEQUENCE, width),))


@pytest.mark.parametrize(("width", "vocabulary"), of(SHAPES, "hidden_size", "vocab_size"))
def test_cross_entropy(width: int, vocabulary: int) -> None:
    labels = torch.arange(BATCH * SEQUENCE, device="cuda") * 7919 % vocabulary
    inputs = (random(BATCH * SEQUENCE, width), random(vocabulary, width, seed=1) * width**-0.5)
    for chunk in (None, 100):
        assert_as_fp32(
            lambda hidden, weight, chunk=chunk: linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk),
            lambda hidden, weight: F.cross_entropy(hidden @ weight.t(), labels),
            inputs,
        )


def test_cross_entropy_never_holds_fp32_logits() -> None:
    """At Llama 3's vocabulary and sequence the fp32 logits of one sequence, and as many gradients, are 7.8 GiB."""
    tokens, vocabulary, width = 8192, 128256, 4096
    torch.compiler.reset()  # which gives up on a function after eight shapes
    hidden, weight = random(tokens, width).requires_grad_(), random(vocabulary, width, seed=1).requires_grad_()
    labels = torch.arange(tokens, device="cuda")
    peaks = []
    for fused in (True, False):
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logits = None if fused else (hidden @ weight.t()).float()
        loss = F.cross_entropy(logits, labels) if logits is not None else linear_cross_entropy(hidden, weight, labels)
        loss.backward()
        del logits, loss
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2**30)
    print(f"cross-entropy at {tokens} tokens, vocabulary {vocabulary}: {peaks[0]:.2f} GiB, plain {peaks[1]:.2f} GiB")
    gradients = (weight.numel() * (4 + 2) + hidden.numel() * 2) / 2**30  # fp32 while they are summed up
    assert peaks[0] < gradients + 3.0 < peaks[1]


def test_fused_adamw() -> None:
    """Against torch's plain loop over parameters, in fp32, over several steps."""
    weights = []
    for fused in (True, False):
        parameters = [random(300, 77).float().requires_grad_(), random(1001, seed=1).float().requires_grad_()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=fused, foreach=False)
        for step in range(5):
            for parameter in parameters:
                parameter.grad = random(*parameter.shape, seed=step).float()
            optimizer.step()
        weights.append([parameter.detach() for parameter in parameters])
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)
