"""Choose the kernels of a model, fuse element-wise operations, and accumulate weight gradients.

All engines that support a kernel make the same choice. "auto" selects fused kernels: one for the output layer and
cross-entropy (cross_entropy.py), BLOOM's attention and GELU (transformers_blocks.py), RMSNorm (norm.py), and, only on
GPUs, Liger's rotary embedding and SwiGLU for transformers models. "reference" selects the unfused torch code of
transformers, which stores the full logits in fp32.
"""

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megabench.config import ResolvedConfig
from megabench.engines.common.fp8 import has_nvmath
from megabench.engines.common.norm import NARROW
from megabench.record import KernelTraits
from megabench.runtime.attention import FLASH_2, kernel_name
from megabench.runtime.device import DTYPES
from megabench.specs.megatron import tp_overlap

BLOOM_CHANNELS = 8  # extra channels for ALiBi, because flash attention needs head sizes that are multiples of 8
_SDPA = "torch scaled_dot_product_attention"
PLAIN = {
    "norm": "transformers RMSNorm",
    "rope": "transformers unfused",
    "activation": "transformers unfused SwiGLU",
    "cross_entropy": "torch, fp32 logits",
}
_PLAIN_OF = {
    "gpt2": {"norm": "torch layer_norm", "rope": "none: learned positions", "activation": "transformers unfused GELU"},
    "bloom": {
        "attention": "transformers eager, ALiBi",
        "norm": "torch layer_norm",
        "rope": "none: ALiBi",
        "activation": "transformers unfused BLOOM GELU",
    },
}
# families of transformers models with RMSNorm, SwiGLU and rotary embedding, which Liger supports
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
FUSED_CROSS_ENTROPY = "megabench linear_cross_entropy, in chunks"


def fuses_cross_entropy(run: ResolvedConfig) -> bool:
    """Return whether the output layer and the loss are fused, without storing the logits.

    Models without a table are excluded, because they may modify their logits before the loss.
    """
    return run.kernels == "auto" and run.shape.foreign is None


def fuses_bloom(run: ResolvedConfig) -> bool:
    """Return whether fused attention and GELU replace those of transformers in BLOOM."""
    return run.kernels == "auto" and run.shape.family == "bloom" and run.shape.foreign is None


def fuses_norms(run: ResolvedConfig) -> bool:
    """Return whether norm.py replaces the RMSNorms of a transformers model, and the additions before them."""
    return run.kernels == "auto" and _is_llama_like(run)


def _is_llama_like(run: ResolvedConfig) -> bool:
    return run.shape.family in _LLAMA_LIKE and run.shape.foreign is None


def uses_liger(run: ResolvedConfig) -> bool:
    """Return whether Liger's kernels replace modules of transformers.

    Models without a table are excluded, because Liger's MLP has neither biases nor other activations than SiLU.
    """
    serves = run.kernels == "auto" and run.device == "cuda" and _is_llama_like(run)
    return serves and find_spec("liger_kernel") is not None


def swiglu_finds_amax(run: ResolvedConfig) -> bool:
    """Return whether the SwiGLU of transformers' blocks finds the amaxes for the fp8 products around it.

    A compiled block computes SwiGLU with other operations, in kernels of torch.compile.
    """
    return bool(run.fp8_layers) and _is_llama_like(run) and not run.options.get("compile")


def patch_transformers(run: ResolvedConfig) -> None:
    """Patch transformers' modules with Liger's kernels, and disable a check in them, for the life of this process."""
    from transformers import masking_utils

    # This check looks for packed sequences, which batches do not have, and makes the host wait for the GPU.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    if uses_liger(run):
        import liger_kernel.transformers as liger

        # it warns that its kernels for other hardware cannot be imported
        logging.getLogger("liger_kernel.backends.registry").setLevel(logging.ERROR)

        getattr(liger, f"apply_liger_kernel_to_{run.shape.family}")(
            rope=True, rms_norm=False, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
        )


def names_for_transformers(run: ResolvedConfig) -> dict[str, str]:
    """Return the kernel of each operation of a transformers model, for the record."""
    names = {"attention": _attention(run)} | PLAIN | _PLAIN_OF.get(run.shape.family, {})
    if run.shape.foreign:
        names = dict.fromkeys(names, "transformers") | {"cross_entropy": PLAIN["cross_entropy"]}
    if fuses_cross_entropy(run):
        names["cross_entropy"] = FUSED_CROSS_ENTROPY
    if fuses_bloom(run):
        attention = _attention(run, run.shape.head_dim + BLOOM_CHANNELS)
        names |= {"attention": f"{attention}, ALiBi in extra channels", "activation": "torch GELU"}
    if uses_liger(run):
        names |= {"rope": "Liger rotary embedding", "activation": "Liger SwiGLU"}
    if fuses_norms(run):
        names["norm"] = f"torch.compile; the last one: {_norm(run)}" if run.options.get("compile") else _norm(run)
    if swiglu_finds_amax(run):
        names["activation"] = f"{_elementwise(run)} SwiGLU"
    return names | _fp8_products(run)


def traits_for_transformers(run: ResolvedConfig) -> KernelTraits:
    """Return the traits of the kernels in `names_for_transformers`."""
    if run.shape.foreign:
        own = KernelTraits(fused_loss=False)
    else:
        has_plain_norm = "norm" not in _PLAIN_OF.get(run.shape.family, {}) and not fuses_norms(run)
        own = KernelTraits(
            flash_attention=(run.shape.family != "bloom" or fuses_bloom(run)) and "unfused" not in _attention(run),
            fused_norm=not has_plain_norm,
            fused_activation=fuses_bloom(run) or (swiglu_finds_amax(run) and run.device == "cuda"),
            fused_loss=fuses_cross_entropy(run),
        )
    return own.model_copy(update={"fused_norm": True, "fused_activation": True}) if uses_liger(run) else own


def names_for_megatron(run: ResolvedConfig) -> dict[str, str]:
    """Return the kernel of each operation of the tensor-parallel blocks, for the record."""
    elementwise, norm, weight_gradient = "megatron-core unfused", "torch rms_norm", "megatron-core, then added"
    if fuses_blocks(run):
        elementwise = _elementwise(run)
        is_summed = not has_fp8_gradients(run) or fuses_fp8_weight_gradient(run)
        weight_gradient = "summed up by its product" if is_summed else "added after its product"
        if not adds_output_gradient(run):
            weight_gradient += ", except that of the output layer"
        norm = _norm(run)
    attention = _attention(run)
    if _exchanges_heads(run):
        attention += ", of a part of the heads"
    elif run.layout.cp > 1:
        # on GPUs, only torch's own kernel supports queries that are shorter than their keys
        is_flash = run.device == "cuda" and run.precision != "fp32"
        attention = _SDPA + f": {FLASH_2}" * is_flash + ", of a chunk's queries and all keys before"
    return PLAIN | {
        "attention": attention,
        "norm": norm,
        "rope": elementwise,
        "activation": f"{elementwise} SwiGLU",
        "cross_entropy": FUSED_CROSS_ENTROPY
        if fuses_cross_entropy(run)
        else "megatron-core vocab-parallel, fp32 logits",
        "weight_gradient": weight_gradient,
        **_tp_exchange(run),
        **_fp8_products(run),
    }


def _tp_exchange(run: ResolvedConfig) -> dict[str, str]:
    if run.layout.tp == 1:
        return {}
    if tp_overlap(run) == "copy-engines":
        return {"tp_exchange": "copy engines" if run.device == "cuda" else "messages between products, by gloo"}
    return {"tp_exchange": "NCCL collectives" if run.device == "cuda" else "gloo collectives"}


def _fp8_products(run: ResolvedConfig) -> dict[str, str]:
    return {"fp8_products": "emulated on CPU: fp8 values, multiplied in fp32"} if run.emulates_fp8 else {}


def _norm(run: ResolvedConfig) -> str:
    is_own = run.device == "cuda" and run.shape.hidden_size >= NARROW
    return "megabench fused RMSNorm" if is_own else "torch rms_norm"


def _elementwise(run: ResolvedConfig) -> str:
    return "megabench fused" if run.device == "cuda" else "megabench unfused"


def _attention(run: ResolvedConfig, head_size: int | None = None) -> str:
    shape = run.shape
    kernel = kernel_name(
        torch.device(run.device),
        DTYPES[run.precision],
        run.seq_length,
        head_size or shape.head_dim,
        shape.num_heads // shape.num_kv_heads,
    )
    return f"{_SDPA}: {kernel}"


def traits_for_megatron(run: ResolvedConfig) -> KernelTraits:
    """Return the traits of the kernels in `names_for_megatron`."""
    return KernelTraits(
        flash_attention="unfused" not in _attention(run),
        fused_norm=True,
        fused_activation=fuses_blocks(run) and run.device == "cuda",
        fused_loss=fuses_cross_entropy(run),
        exchanges_heads=_exchanges_heads(run),
        fuses_weight_gradient=fuses_blocks(run),
        fuses_fp8_weight_gradient=fuses_fp8_weight_gradient(run),
        adds_output_gradient=adds_output_gradient(run),
        copies_tp=tp_overlap(run) == "copy-engines",
    )


def _exchanges_heads(run: ResolvedConfig) -> bool:
    """Return whether context-parallel ranks exchange parts of the sequence for parts of the heads."""
    return run.layout.cp > 1 and run.shape.num_kv_heads % (run.layout.tp * run.layout.cp) == 0


def adds_output_gradient(run: ResolvedConfig) -> bool:
    """Return whether the output layer's matrix product accumulates the weight gradient under the megatron engine.

    It does not in three cases: if the weight is tied, because the embedding also contributes to its gradient; in fp16,
    because the loss scale changes; and if gradients are accumulated in bf16, because the sum would be rounded after
    each chunk of tokens.
    """
    is_tied = run.shape.tied_embeddings
    return fuses_cross_entropy(run) and not is_tied and not run.policy.scales_loss and run.grad_dtype == "fp32"


def fuses_fp8_weight_gradient(run: ResolvedConfig) -> bool:
    """Return whether the fp8 products of the tensor-parallel blocks accumulate the weight gradients."""
    return fuses_blocks(run) and has_fp8_gradients(run) and run.device == "cuda" and has_nvmath()


def has_fp8_gradients(run: ResolvedConfig) -> bool:
    """Return whether fp8 products compute weight gradients."""
    return bool(run.fp8_layers) and run.fp8_recipe == "tensorwise"


def fuses_blocks(run: ResolvedConfig) -> bool:
    """Return whether the tensor-parallel blocks use megabench's layers, linear layers, attention, norms and SwiGLU.

    Without fused kernels, the blocks use megatron-core's own operations.
    """
    return run.kernels == "auto"


def fused(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    """Compile `function` on a GPU, so that it reads its inputs once, computes in fp32, and writes once."""
    return _compiled(function) if like.device.type == "cuda" else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def accumulate(total: Tensor, grads: Tensor, inputs: Tensor, factor: float = 1.0) -> None:
    """Add factor · gradsᵀ [V, C] · inputs [C, H] to total [V, H], which is fp32 or has the dtype of the inputs.

    On a GPU, the matrix product adds to the sum directly, without rounding or storing the product.
    """
    if total.device.type == "cuda" and total.dtype != inputs.dtype:
        torch.addmm(total, grads.t(), inputs, alpha=factor, out_dtype=total.dtype, out=total)
    elif total.device.type == "cuda" or total.dtype == inputs.dtype:
        torch.addmm(total, grads.t(), inputs, alpha=factor, out=total)
    else:
        total.add_(grads.t() @ inputs, alpha=factor)
