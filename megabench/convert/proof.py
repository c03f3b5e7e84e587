"""Selection of the comparison for a model: tensor-parallel blocks layer by layer, or the whole transformers model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megabench.convert import ConvertError
from megabench.convert.samples import sample_tokens
from megabench.convert.verifying import Advance, Comparison, compare, comparison_run, num_parts
from megabench.convert.whole_model import NUM_PARTS, compare_whole
from megabench.models.model_directory import HuggingFaceWeights
from megabench.models.shape import ModelShape
from megabench.models.weights import Weights

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
    return Proof(partial(compare_whole, shape=shape, tokens=tokens), NUM_PARTS)
