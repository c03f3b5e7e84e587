"""Comparison of the logits of a Hugging Face model with those of other weights.

A model with tensor-parallel blocks is compared layer by layer (convert/verifying.py). Other models are computed with
transformers: one transformers model loads the Hugging Face files, the other loads the weights of the checkpoint. Both
models use fp32. The comparison holds one whole model in memory at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from megabench.convert import ConvertError
from megabench.convert.verifying import (
    Advance,
    Comparison,
    compare,
    comparison_run,
    difference,
    num_parts,
    sample_tokens,
)
from megabench.models.causal_lm import build_model
from megabench.models.hugging_face import transformers_config
from megabench.models.mapping import stored_shapes, whole_piece
from megabench.models.model_directory import HuggingFaceWeights
from megabench.models.shape import ModelShape
from megabench.models.weights import Weights

_NUM_PARTS = 2  # number of progress updates of a comparison
# function that compares the logits of a Hugging Face directory with those of other weights
Compare = Callable[[HuggingFaceWeights, Weights, Advance], Comparison]


@dataclass(frozen=True)
class Proof:
    """A comparison of logits. `num_parts` is the number of progress updates that `compare` reports on rank 0."""

    compare: Compare
    num_parts: int


def proof_of(model: Path, shape: ModelShape, tokenizer: Path, tp: int = 1, pp: int = 1) -> Proof:
    """Return the comparison of weights of `shape` with the model in directory `model`, for tp·pp ranks.

    Raises:
        LayoutError: `tp` or `pp` does not fit the model.
        ConvertError: tp·pp is greater than 1, but the model has no tensor-parallel blocks.
    """
    tokens = sample_tokens(tokenizer, shape)
    if shape.table.has_parallel_blocks:
        run = comparison_run(str(model), tp, pp)
        return Proof(partial(compare, run=run, tokens=tokens), num_parts(run))
    if tp * pp > 1:
        raise ConvertError(
            f"tp={tp}, pp={pp}: {shape.why_no_blocks} and has no tensor-parallel blocks. Omit tp and pp."
        )
    return Proof(partial(_compare_whole, shape=shape, tokens=tokens), _NUM_PARTS)


@torch.no_grad()
def _compare_whole(
    reference: HuggingFaceWeights, weights: Weights, advance: Advance, *, shape: ModelShape, tokens: Tensor
) -> Comparison:
    """Compare the transformers model in the directory of `reference` with a transformers model that has `weights`.

    `shape` comes from the configuration of `weights`, because the configuration in the directory may differ. `tokens`
    has shape [B, S].
    """
    disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(
        reference.folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    theirs = _logits(loaded, tokens)
    del loaded
    advance("transformers on the files")
    model = build_model(transformers_config(shape))
    for name, size in stored_shapes(shape).items():
        tensor = model.get_parameter_or_buffer(name)
        tensor.copy_(weights.read(whole_piece(name, size)).view(size))
    ours = _logits(model, tokens)
    advance("transformers on the weights")
    return difference(theirs, ours)


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    return logits
