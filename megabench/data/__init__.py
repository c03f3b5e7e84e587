"""Tokens, in an order that does not depend on the layout."""

from megabench import UserError


class DataError(UserError):
    """Text, tokens or a tokenizer that cannot be used."""
