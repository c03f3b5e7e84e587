"""The weight mapping between Hugging Face tensors and parallel shards, said once and used in both directions.

A shard of a parallel parameter is a list of pieces, each a block of rows and columns of one Hugging Face tensor; the
pieces stacked along dim 0 are the shard. Plain sizes in, no process groups and no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megabench.models.catalog import ModelShape


@dataclass(frozen=True)
class Piece:
    """Rows and columns [start, stop) of the Hugging Face tensor `name`; `columns` is None for a vector."""

    name: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]


@dataclass(frozen=True)
class Shard:
    """What one tensor-parallel rank holds of a parallel parameter: `pieces` stacked, then `padding_rows` of zeros."""

    pieces: tuple[Piece, ...]
    padding_rows: int = 0


def padded_vocab_size(shape: ModelShape, tp: int) -> int:
    """The vocabulary rounded up so that every tensor-parallel rank holds as many rows."""
    return -(-shape.vocab_size // tp) * tp


def hugging_face_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face parameter of a Llama and its shape, in the order of the model."""
    hidden, ffn = shape.hidden_size, shape.ffn_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (ffn, hidden),
            prefix + "mlp.up_proj.weight": (ffn, hidden),
            prefix + "mlp.down_proj.weight": (hidden, ffn),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (shape.vocab_size, hidden)}


def _part(size: int, tp: int, rank: int) -> tuple[int, int]:
    return size * rank // tp, size * (rank + 1) // tp


def _replicated(name: str, shape: ModelShape, tp: int, rank: int) -> Shard:
    return Shard((Piece(name, (0, shape.hidden_size)),))


def _vocabulary(name: str, shape: ModelShape, tp: int, rank: int) -> Shard:
    """Rows of the padded vocabulary; what lies beyond the true one is padding."""
    start, stop = _part(padded_vocab_size(shape, tp), tp, rank)
    real = min(start, shape.vocab_size), min(stop, shape.vocab_size)
    padding = (stop - start) - (real[1] - real[0])
    return Shard((Piece(name, real, (0, shape.hidden_size)),), padding)


def _qkv(name: str, shape: ModelShape, tp: int, rank: int) -> Shard:
    """By query group: [the group's query heads, its key, its value], so that contiguous parts are whole groups."""
    columns = (0, shape.hidden_size)
    queries = shape.num_heads // shape.num_kv_heads * shape.head_dim
    pieces = []
    for group in range(*_part(shape.num_kv_heads, tp, rank)):
        pieces.append(Piece(f"{name}q_proj.weight", (group * queries, (group + 1) * queries), columns))
        for projection in ("k_proj", "v_proj"):
            rows = (group * shape.head_dim, (group + 1) * shape.head_dim)
            pieces.append(Piece(f"{name}{projection}.weight", rows, columns))
    return Shard(tuple(pieces))


def _gate_up(name: str, shape: ModelShape, tp: int, rank: int) -> Shard:
    """[this rank's gate rows; its up rows], not a part of [gate; up]."""
    rows, columns = _part(shape.ffn_size, tp, rank), (0, shape.hidden_size)
    return Shard(tuple(Piece(f"{name}{half}.weight", rows, columns) for half in ("gate_proj", "up_proj")))


def _row_parallel(name: str, shape: ModelShape, tp: int, rank: int, width: int) -> Shard:
    return Shard((Piece(name, (0, shape.hidden_size), _part(width, tp, rank)),))


def _attention_output(name: str, shape: ModelShape, tp: int, rank: int) -> Shard:
    return _row_parallel(name, shape, tp, rank, shape.num_heads * shape.head_dim)


def _down(name: str, shape: ModelShape, tp: int, rank: int) -> Shard:
    return _row_parallel(name, shape, tp, rank, shape.ffn_size)


_Rule = tuple[str, Callable[[str, ModelShape, int, int], Shard]]

# parallel parameter -> (Hugging Face name or prefix, how a tensor-parallel rank's shard is cut)
_ENDS: dict[str, _Rule] = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", _vocabulary),
    "decoder.final_layernorm.weight": ("model.norm.weight", _replicated),
    "output_layer.weight": ("lm_head.weight", _vocabulary),
}
_LAYER: dict[str, _Rule] = {
    "input_layernorm.weight": ("input_layernorm.weight", _replicated),
    "self_attention.linear_qkv.weight": ("self_attn.", _qkv),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", _attention_output),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", _replicated),
    "mlp.linear_fc1.weight": ("mlp.", _gate_up),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", _down),
}


def shard(parameter: str, shape: ModelShape, tp: int, rank: int) -> Shard:
    """The shard that tensor-parallel `rank` of `tp` holds of a parallel parameter.

    `parameter` counts layers through the whole model, as in "decoder.layers.7.mlp.linear_fc1.weight".
    """
    if parameter in _ENDS:
        name, cut = _ENDS[parameter]
        return cut(name, shape, tp, rank)
    layer, _, rest = parameter.removeprefix("decoder.layers.").partition(".")
    name, cut = _LAYER[rest]
    return cut(f"model.layers.{int(layer)}.{name}", shape, tp, rank)


def parallel_parameters(layers: range, has_embedding: bool, has_output: bool) -> list[str]:
    """The parallel parameters of a model chunk that holds `layers`, in the order of the model."""
    first = ["embedding.word_embeddings.weight"] if has_embedding else []
    middle = [f"decoder.layers.{layer}.{name}" for layer in layers for name in _LAYER]
    last = ["decoder.final_layernorm.weight", "output_layer.weight"] if has_output else []
    return first + middle + last
