"""From a Hugging Face directory to a checkpoint, each rank of a layout reading and writing its own part."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megabench import UserError
from megabench.checkpoint.directory import commit
from megabench.checkpoint.files import write_assets
from megabench.checkpoint.manifest import FileEntry, ModelEntry
from megabench.checkpoint.weights_only import Weights, open_weights, weights_manifest, write_weights
from megabench.config import ResolvedConfig
from megabench.convert import ConvertError, UnequalError
from megabench.convert.verifying import Advance, Comparison, compare
from megabench.models.families import OUTPUT
from megabench.models.find import find_model
from megabench.models.mapping import Piece, parallel_parameters, shard
from megabench.models.model_directory import HuggingFaceWeights, read_assets
from megabench.models.shape import ModelShape
from megabench.parallel.layout import Layout


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote, and how its result compares; `comparison` is None where none was asked for."""

    folder: Path
    num_bytes: int
    num_files: int
    write_seconds: float
    compare_seconds: float
    comparison: Comparison | None


def check_new(out: Path) -> None:
    """ConvertError where something lies at `out` already."""
    if out.exists():
        raise ConvertError(f"{out} exists already; give the path of a new folder")


def partial_of(out: Path) -> Path:
    """Where a conversion writes until it is known to be good."""
    return out.with_name(f".{out.name}.partial")


def import_model(
    source: HuggingFaceWeights, out: Path, run: ResolvedConfig, tokens: Tensor | None, advance: Advance
) -> Converted:
    """Writes the model of `source` to the checkpoint `out` under the layout of `run`, and compares both on `tokens`.

    Collective over the tp·pp ranks. ConvertError where it cannot be written, UnequalError where the comparison fails;
    nothing is left at `out` then.
    """
    partial, is_first = partial_of(out), dist.get_rank() == 0
    began = time.perf_counter()
    try:
        with _all_or_none(f"{out} cannot be written"):
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        mine: list[FileEntry] = []
        with _all_or_none(f"{out} cannot be written"):
            mine = _write(source, partial, run.layout, advance)
        parts: list[list[FileEntry]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, mine)
        files = [file for part in parts for file in part]
        with _all_or_none(f"{out} cannot be written"):
            if is_first:
                weights_manifest(source.shape, files).write(partial)
        written = time.perf_counter()
        with _all_or_none(f"{out} is not what was read"):
            weights = open_weights(partial, dist.get_rank(), dist.get_world_size())
            _check_identical(source, weights, run.layout)
        comparison = compare(source, weights, advance, run=run, tokens=tokens) if tokens is not None else None
        check_equal(comparison, f"{out} would not compute what {source.folder} does")
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
    )


@contextmanager
def _all_or_none(sentence: str) -> Iterator[None]:
    """What every rank must do: where one fails, all raise ConvertError, which begins with `sentence`."""
    error = None
    try:
        yield
    except OSError as failure:
        error = f"{failure.strerror}; give a path on a disk with room"
    except UserError as failure:
        error = str(failure)
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if first := next(((rank, text) for rank, text in enumerate(errors) if text), None):
        raise ConvertError(f"{sentence}: rank {first[0]}: {first[1]}")


def check_equal(comparison: Comparison | None, sentence: str) -> None:
    """UnequalError, beginning with `sentence`, unless two models are equal."""
    if comparison and not comparison.is_equal:
        raise UnequalError(
            f"{sentence}: over {comparison.num_tokens} tokens logits differ by up to {comparison.max_difference:.2g} "
            f"(the largest is {comparison.max_logit:.3g}), predictions by a KL divergence of {comparison.kl:.2g}"
        )


def _write(source: HuggingFaceWeights, partial: Path, layout: Layout, advance: Advance) -> list[FileEntry]:
    """Writes the blocks of this rank, and on rank 0 what belongs beside them."""
    rank = dist.get_rank()

    def blocks() -> Iterator[tuple[Piece, Tensor]]:
        for piece in owned_blocks(source.shape, layout, rank):
            yield piece, source.read(piece)
            advance(f"writing {piece.name}")

    files = write_weights(partial, f"rank-{rank:05d}", blocks())
    return files + (write_assets(partial, read_assets(source.folder)) if rank == 0 else [])


def owned_blocks(shape: ModelShape, layout: Layout, rank: int) -> list[Piece]:
    """The blocks of Hugging Face tensors that a rank writes: those of an even share of the layers, each once."""
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


def _check_identical(source: HuggingFaceWeights, weights: Weights, layout: Layout) -> None:
    """ConvertError unless every bit of the blocks of this rank is in the checkpoint as it is in the source."""
    for piece in owned_blocks(source.shape, layout, dist.get_rank()):
        dtype = source.dtype(piece.name)
        if weights.dtype(piece.name) != dtype or not same_bits(weights.read(piece, dtype), source.read(piece)):
            raise ConvertError(f"{piece.name} differs")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes; numbers that are none are equal to themselves, too."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def check_same_model(source: HuggingFaceWeights, weights: Weights) -> None:
    """ConvertError, naming both, unless a checkpoint holds the model of a directory."""
    held = weights.manifest.model
    if source.shape.foreign:  # of a directory less is known than of a model of the catalogue
        held = ModelEntry.of(find_model(str(weights.folder)))
    if difference := held.difference(ModelEntry.of(source.shape)):
        raise ConvertError(f"{weights.folder} holds another model than {source.folder}: {difference}")
