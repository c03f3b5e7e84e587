"""Checkpoints from and to Hugging Face, and the proof that both compute the same."""

from megabench import UserError


class ConvertError(UserError):
    """A conversion that cannot be done."""


class UnequalError(ConvertError):
    """Two models that do not compute the same."""
