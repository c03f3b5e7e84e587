"""Training data: tokenizers, token files, and batches whose order does not depend on the layout."""

from megabench.errors import UserError


class DataError(UserError):
    """Raised if a text file, a token file or a tokenizer cannot be used."""
