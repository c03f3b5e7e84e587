"""The config.json of a run that trains a model of the catalogue."""

import json
from pathlib import Path

from megabench.config import ResolvedConfig
from megabench.data.checks import STDLIB, tokenizer_of
from megabench.data.text import is_text_file
from megabench.data.token_file import recorded_facts, token_file_prefix
from megabench.data.tokenizer import BYTES, ByteTokenizer, open_tokenizer
from megabench.models.hugging_face import config_text


def catalog_config(run: ResolvedConfig) -> bytes:
    """Return the content of config.json for the model of a run, with the run's sequence length and special tokens.

    Programs that serve the model accept no longer sequences than `max_position_embeddings`, and stop at
    `eos_token_id`. Fields that the file omits have the defaults of the model's family. `bos_token_id` is null, because
    no document of the training data begins with a special token.
    """
    content = json.loads(config_text(run.shape))
    if (num_positions := content.get("max_position_embeddings")) and run.shape.rope_theta:
        content["max_position_embeddings"] = max(num_positions, run.seq_length)
    content |= {"bos_token_id": None, "eos_token_id": _end_of_document(run)}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _end_of_document(run: ResolvedConfig) -> int | None:
    """Return the token that ends a document in the training data, or None if the tokenizer of the data is unknown."""
    path = Path(run.data)
    if run.data == STDLIB or is_text_file(path):
        return tokenizer_of(run).end_of_document
    if run.tokenizer:
        return open_tokenizer(run.tokenizer).end_of_document
    facts = recorded_facts(prefix) if (prefix := token_file_prefix(path)) else None
    has_bytes = facts and facts.tokenizer and facts.tokenizer.name == BYTES
    return ByteTokenizer.end_of_document if has_bytes else None
