"""Summary of a checkpoint as a plain-text table."""

from pathlib import Path

from rich.table import Table

from megabench.checkpoint.weights_only import open_weights
from megabench.models.find import ASSETS


def describe(folder: Path) -> Table:
    """Return a table with the model of a checkpoint, its sizes, and the run that wrote the checkpoint.

    Raises:
        CheckpointError: The checkpoint does not exist or is damaged.
    """
    weights = open_weights(folder)
    manifest = weights.manifest
    table = Table(title=str(weights.folder), show_header=False, title_justify="left")
    shape = manifest.model.shape
    table.add_row("model", f"{manifest.model.name} ({shape['family']})")
    table.add_row(
        "layers, hidden, heads, KV heads", _words(shape, "num_layers", "hidden_size", "num_heads", "num_kv_heads")
    )
    table.add_row("FFN, vocabulary", _words(shape, "ffn_size", "vocab_size"))
    table.add_row("tied embeddings", "yes" if shape["tied_embeddings"] else "no")
    for kind, number in manifest.num_elements.items():
        table.add_row(f"{kind}, elements", f"{number:,}")
    table.add_row("dtypes of the weights", ", ".join(sorted({str(weights.dtype(name)) for name in weights.names})))
    table.add_row("files", f"{len(manifest.files)}, {manifest.num_bytes / 1e9:.3f} GB, all checksums match")
    prefix = f"{ASSETS}/"
    beside = [file.name.removeprefix(prefix) for file in manifest.files if file.name.startswith(prefix)]
    table.add_row("model files", ", ".join(beside) or "none")
    if training := manifest.training:
        sizes = " ".join(f"{axis}{size}" for axis, size in training.layout.items() if size)
        table.add_row("written by", f"a run of the {training.engine} engine, {sizes}, {training.world_size} ranks")
        table.add_row("step", f"{training.step} ({training.optimizer.name}, {training.optimizer.step} updates)")
        table.add_row("data", f"{training.data.name}, {training.data.next_sequence:,} sequences read")
    else:
        table.add_row("written by", "an import (weights only)")
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())))
    return table


def _words(shape: dict[str, object], *fields: str) -> str:
    return ", ".join(f"{shape[field]:,}" for field in fields)
