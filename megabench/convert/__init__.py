"""Conversion between checkpoints and Hugging Face model directories, and comparison of their logits."""

from megabench.errors import UserError


class ConvertError(UserError):
    """Raised if a conversion is impossible or fails."""


class UnequalError(ConvertError):
    """Raised if the logits of two models differ by more than rounding."""

    exit_status = 1
