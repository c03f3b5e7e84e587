"""Comparison of logits for models without tensor-parallel blocks, computed with transformers.

One transformers model loads the Hugging Face files, the other loads the weights of the checkpoint. Both
models use fp32. The comparison holds one whole model in memory at a time.
"""

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from megabench.convert.verifying import Advance, Comparison, difference
from megabench.models.causal_lm import build_model
from megabench.models.hugging_face import transformers_config
from megabench.models.mapping import stored_shapes, whole_piece
from megabench.models.model_directory import HuggingFaceWeights
from megabench.models.shape import ModelShape
from megabench.models.weights import Weights

NUM_PARTS = 2  # number of progress updates of a comparison


@torch.no_grad()
def compare_whole(
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
