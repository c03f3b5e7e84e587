"""Which proof a model gets: the parallel blocks of a layout, or where it has none, transformers' own whole model."""

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

# a Hugging Face directory, and the weights that it is compared with
Compare = Callable[[HuggingFaceWeights, Weights, Advance], Comparison]


@dataclass(frozen=True)
class Proof:
    """How two models are compared; `num_parts` is how often that advances on rank 0."""

    compare: Compare
    num_parts: int


def proof_of(model: Path, shape: ModelShape, tokenizer: Path, tp: int = 1, pp: int = 1) -> Proof:
    """The proof for weights of `shape` and the model that the directory `model` describes, over tp·pp ranks.

    LayoutError where tp and pp do not fit the model, ConvertError where it has no blocks to be cut.
    """
    tokens = sample_tokens(tokenizer, shape)
    if shape.table.has_parallel_blocks:
        run = comparison_run(str(model), tp, pp)
        return Proof(partial(compare, run=run, tokens=tokens), num_parts(run))
    if tp * pp > 1:
        raise ConvertError(
            f"tp={tp}, pp={pp}: {shape.why_no_blocks} and has no parallel blocks to be cut; leave both out"
        )
    return Proof(partial(compare_whole, shape=shape, tokens=tokens), NUM_PARTS)
