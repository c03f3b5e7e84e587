"""Gather whole Hugging Face tensors from the shards of a parallel model."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megabench.config import ResolvedConfig
from megabench.models.families import OUTPUT
from megabench.models.mapping import Shard, hugging_face_shapes, parallel_parameters, shard
from megabench.specs.megatron import chunk_layers


def full_tensors(
    local: dict[str, Tensor], run: ResolvedConfig, groups: ProcessGroupCollection, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor as fp32 on CPU, on every rank, in the order of the model.

    `local` maps parallel names to this rank's shards, with layers numbered through the whole model. All ranks must call
    this function. Each pipeline stage broadcasts its shards to the other stages, and the tensor-parallel group gathers
    them.
    """
    shape, layout = run.shape, run.layout
    shapes = hugging_face_shapes(shape)
    stages = chunk_layers(run)
    for number in range(layout.pp * layout.vp):
        chunk, stage = divmod(number, layout.pp)
        names = parallel_parameters(
            shape, stages[stage][chunk], has_embedding=number == 0, has_output=number == layout.pp * layout.vp - 1
        )
        for name in names:
            if name == OUTPUT and shape.tied_embeddings:
                continue  # a stage's copy of the tied embedding
            cuts = [shard(name, shape, layout.tp, rank) for rank in range(layout.tp)]
            mine = torch.empty(_shard_shape(cuts[groups.tp.rank()]), device=device)
            if stage == groups.pp.rank():
                mine.copy_(local[name])
            dist.broadcast(mine, src=dist.get_global_rank(groups.pp, stage), group=groups.pp)
            parts = [torch.empty_like(mine) for _ in cuts]
            dist.all_gather(parts, mine, group=groups.tp)
            yield from assemble(cuts, parts, shapes).items()


def _shard_shape(cut: Shard) -> tuple[int, ...]:
    rows = sum(piece.num_rows for piece in cut.pieces) + cut.padding_rows
    columns = cut.pieces[0].columns
    return (rows,) if columns is None else (rows, columns[1] - columns[0])


def assemble(cuts: list[Shard], parts: list[Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the Hugging Face tensors from the shards of all tensor-parallel ranks, on CPU and without padding."""
    tensors: dict[str, Tensor] = {}
    for cut, part in zip(cuts, parts, strict=True):
        row = 0
        for piece in cut.pieces:
            tensor = tensors.setdefault(piece.name, torch.full(shapes[piece.name], torch.nan))
            target = tensor[slice(*piece.rows)]
            if piece.columns is not None:
                target = target[:, slice(*piece.columns)]
            target.copy_(part[row : row + piece.num_rows])
            row += piece.num_rows
    return tensors
