"""Sample tokens for the comparison of models."""

import textwrap
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from megabench.data import DataError
from megabench.data.text import TextPiece
from megabench.data.tokenizer import HuggingFaceTokenizer
from megabench.models.assets import has_tokenizer
from megabench.models.shape import ModelShape

SEQ_LENGTH = 128


def sample_tokens(folder: Path, shape: ModelShape) -> Tensor:
    """Return two sequences of tokens, int64 [2, S].

    The first sequence is English text and code, tokenized with the tokenizer in `folder`, or as bytes if `folder` has
    no tokenizer that transformers can load. The second sequence contains random tokens and the first and last token of
    the vocabulary.
    """
    text = Path(textwrap.__file__).read_bytes()
    ids = torch.tensor(list(text[:SEQ_LENGTH]))
    if has_tokenizer(folder):
        with suppress(DataError):  # some tokenizers need packages that megabench does not install
            tokenized = HuggingFaceTokenizer(folder).encode(TextPiece(text, "textwrap.py", True, len(text)))
            ids = torch.from_numpy(tokenized[:SEQ_LENGTH])
    anywhere = torch.randint(shape.vocab_size, (SEQ_LENGTH,), generator=torch.Generator().manual_seed(0))
    anywhere[0], anywhere[-1] = 0, shape.vocab_size - 1
    return torch.stack([ids % shape.vocab_size, anywhere])
