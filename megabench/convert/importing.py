"""Import of a Hugging Face model directory to a checkpoint. Each rank of a layout reads and writes its own shards."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megabench.checkpoint.directory import commit
from megabench.checkpoint.files import write_assets
from megabench.checkpoint.manifest import FileEntry, ModelEntry
from megabench.checkpoint.weights_only import CheckpointWeights, open_weights, weights_manifest, write_weights
from megabench.config import ResolvedConfig
from megabench.convert import ConvertError, UnequalError
from megabench.convert.verifying import Advance, Comparison, compare
from megabench.errors import UserError
from megabench.models.assets import read_assets
from megabench.models.families import OUTPUT
from megabench.models.find import find_model
from megabench.models.mapping import Piece, parallel_parameters, shard
from megabench.models.model_directory import HuggingFaceWeights
from megabench.models.shape import ModelShape
from megabench.parallel.layout import Layout


@dataclass(frozen=True)
class Converted:
    """The output of a conversion. `comparison` is None if no comparison of the logits was requested.

    `notes` are sentences for the user, for example about files that were not copied.
    """

    folder: Path
    num_bytes: int
    num_files: int
    write_seconds: float
    compare_seconds: float
    comparison: Comparison | None
    notes: tuple[str, ...] = ()


def check_new(out: Path) -> None:
    """Raise ConvertError if `out` already exists."""
    if out.exists():
        raise ConvertError(f"{out} already exists. Give the path of a new directory.")


def partial_of(out: Path) -> Path:
    """Return the temporary directory that a conversion writes to until all checks have passed."""
    return out.with_name(f".{out.name}.partial")


def import_model(
    source: HuggingFaceWeights, out: Path, run: ResolvedConfig, tokens: Tensor | None, advance: Advance
) -> Converted:
    """Write the model of `source` to the checkpoint `out`, and compare the logits of both models on `tokens`.

    All tp·pp ranks of the layout of `run` must call the function. If `tokens` is None, the logits are not compared.
    After an error, `out` does not exist.

    Raises:
        ConvertError: The checkpoint cannot be written, or its tensors differ from those of `source`.
        UnequalError: The logits of the two models differ.
    """
    partial, is_first = partial_of(out), dist.get_rank() == 0
    notes: list[str] = []
    began = time.perf_counter()
    try:
        with _all_or_none(f"{out} cannot be written"):
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        mine: list[FileEntry] = []
        with _all_or_none(f"{out} cannot be written"):
            mine = _write(source, partial, run.layout, advance, notes)
        parts: list[list[FileEntry]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, mine)
        files = [file for part in parts for file in part]
        with _all_or_none(f"{out} cannot be written"):
            if is_first:
                weights_manifest(source.shape, files).write(partial)
        written = time.perf_counter()
        with _all_or_none(f"{out} does not match {source.folder}"):
            weights = open_weights(partial, dist.get_rank(), dist.get_world_size())
            _check_identical(source, weights, run.layout)
        comparison = compare(source, weights, advance, run=run, tokens=tokens) if tokens is not None else None
        check_equal(comparison, f"{out} was not written, because its logits would differ from {source.folder}")
        if is_first:
            commit(partial, out)
        dist.barrier()
    finally:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
    return Converted(
        folder=out,
        num_bytes=sum(file.num_bytes for file in files),
        num_files=len(files),
        write_seconds=written - began,
        compare_seconds=time.perf_counter() - written,
        comparison=comparison,
        notes=tuple(notes),
    )


@contextmanager
def _all_or_none(sentence: str) -> Iterator[None]:
    """Run the `with` block on all ranks. If one rank fails, all ranks raise ConvertError with prefix `sentence`."""
    error = None
    try:
        yield
    except OSError as failure:
        error = f"{failure.strerror}. Give a path on a disk with free space."
    except UserError as failure:
        error = str(failure)
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if first := next(((rank, text) for rank, text in enumerate(errors) if text), None):
        raise ConvertError(f"{sentence}: rank {first[0]}: {first[1]}")


def check_equal(comparison: Comparison | None, sentence: str) -> None:
    """Raise UnequalError, with prefix `sentence`, if the logits of two models differ by more than rounding."""
    if comparison and not comparison.is_equal:
        raise UnequalError(
            f"{sentence}: over {comparison.num_tokens} tokens, logits differ by up to {comparison.max_difference:.2g} "
            f"(largest logit: {comparison.max_logit:.3g}), and predictions by a KL divergence of {comparison.kl:.2g}"
        )


def _write(
    source: HuggingFaceWeights, partial: Path, layout: Layout, advance: Advance, notes: list[str]
) -> list[FileEntry]:
    """Write the weight blocks of this rank. Rank 0 also writes the other files of the model and adds to `notes`."""
    rank = dist.get_rank()

    def blocks() -> Iterator[tuple[Piece, Tensor]]:
        for piece in owned_blocks(source.shape, layout, rank):
            yield piece, source.read(piece)
            advance(f"writing {piece.name}")

    files = write_weights(partial, f"rank-{rank:05d}", blocks())
    return files + (write_assets(partial, read_assets(source.folder, notes.append)) if rank == 0 else [])


def owned_blocks(shape: ModelShape, layout: Layout, rank: int) -> list[Piece]:
    """Return the blocks of Hugging Face tensors that a rank writes. Every element of a tensor is written by one rank.

    The layers are distributed evenly over the pipeline stages.
    """
    at = layout.coordinates(rank)
    layers = layout.chunk_layers(shape.num_layers)[at.pp][0]
    names = parallel_parameters(shape, layers, has_embedding=at.pp == 0, has_output=at.pp == layout.pp - 1)
    owned: list[Piece] = []
    for name in names:
        cut = shard(name, shape, layout.tp, at.tp)
        is_copy = at.tp > 0 and cut == shard(name, shape, layout.tp, 0)
        if not is_copy and not (name == OUTPUT and shape.tied_embeddings):
            owned += (span for span in cut.spans() if span.num_rows)
    return owned


def _check_identical(source: HuggingFaceWeights, weights: CheckpointWeights, layout: Layout) -> None:
    """Raise ConvertError if a block of this rank is not bitwise equal in the checkpoint and the source."""
    for piece in owned_blocks(source.shape, layout, dist.get_rank()):
        dtype = source.dtype(piece.name)
        if weights.dtype(piece.name) != dtype or not same_bits(weights.read(piece, dtype), source.read(piece)):
            raise ConvertError(f"the tensor {piece.name} differs")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are bitwise equal. NaN values with equal bits are equal."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def check_same_model(source: HuggingFaceWeights, weights: CheckpointWeights) -> None:
    """Raise ConvertError if a checkpoint and a Hugging Face directory contain different models."""
    held = weights.manifest.model
    if source.shape.foreign:  # a Hugging Face directory specifies fewer fields than the model catalog
        held = ModelEntry.of(find_model(str(weights.folder)))
    if difference := held.difference(ModelEntry.of(source.shape)):
        raise ConvertError(f"{weights.folder} (there) and {source.folder} (here) hold different models: {difference}")
