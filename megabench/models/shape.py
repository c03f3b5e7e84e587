"""ModelShape: the sizes of a model, which determine its tensors, FLOPs and memory. Loads no torch."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megabench.models.families import FAMILIES, OUTPUT, Dims, Family, Rule


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the low frequencies of the rotary embedding (rope_type "llama3" in transformers)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Foreign:
    """A Hugging Face model without tensor-parallel blocks.

    Only engines that train transformers models support such a model.

    `table` lists the model's parameters, and `buffers` the shapes of the buffers that are stored with them.
    `config_folder` contains the config.json, and `reason` explains why megabench has no tensor-parallel blocks for the
    model.
    """

    table: Family = field(hash=False)
    buffers: dict[str, tuple[int, ...]] = field(hash=False)
    config_folder: str
    reason: str


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model. The table in families.py for `family` describes the blocks.

    For learned positions, `rope_theta` is None and `num_positions` is set. The embedding of `pad_token_id` gets no
    gradient, as in transformers. `seq_length`, `micro_batch`,
    `global_batch`, `learning_rate` and `lr_warmup` (in steps) are defaults that a run may override.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm_eps: float
    seq_length: int
    micro_batch: int
    global_batch: int
    learning_rate: float
    lr_warmup: int
    source: str
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    num_positions: int | None = None
    tied_embeddings: bool = False
    pad_token_id: int | None = None
    foreign: Foreign | None = None

    @property
    def table(self) -> Family:
        """The table of the model's tensors: that of the model family, or for a foreign model its own table."""
        return self.foreign.table if self.foreign else FAMILIES[self.family]

    @property
    def max_seq_length(self) -> int | None:
        """The largest possible sequence length, or None for a model that computes positions of any length."""
        return self.num_positions if self.table.positions == "learned" else None

    @property
    def last(self) -> tuple[Rule, ...]:
        """The rules for the tensors after the last layer. A tied output layer consists of the embedding tensor."""
        rules = self.table.last
        if self.tied_embeddings:
            rules = tuple(
                replace(rule, tensors={self.table.embedding: "v h"}) if rule.parameter == OUTPUT else rule
                for rule in rules
            )
        return rules

    def dims(self, dims: Dims) -> tuple[int, ...]:
        """Return the tensor shape that a family's table writes in symbols, such as "h 3h"."""
        sizes = {
            "v": self.vocab_size,
            "h": self.hidden_size,
            "q": self.num_heads * self.head_dim,
            "k": self.num_kv_heads * self.head_dim,
            "d": self.head_dim,
            "f": self.ffn_size,
            "p": self.num_positions or 0,
        }
        terms = (re.fullmatch(r"(\d*)([a-z]?)", term) for term in dims.split())
        return tuple(int(term[1] or 1) * sizes.get(term[2], 1) for term in terms if term)

    @property
    def layer_matrices(self) -> list[tuple[int, ...]]:
        """The shapes (rows, columns) of the matrices of one layer."""
        return [size for size in self._sizes(self.table.layer) if len(size) == 2]

    @property
    def layer_matrix_parameters(self) -> int:
        """The number of parameters of one layer that are used in matrix products."""
        return sum(math.prod(size) for size in self._sizes(self.table.layer) if len(size) > 1)

    @property
    def matrix_parameters(self) -> int:
        """The number of parameters in matrix products: layers and output layer, without embedding lookup and norms."""
        last = sum(math.prod(size) for size in self._sizes(self.last) if len(size) > 1)
        is_listed = any(self.table.embedding in rule.tensors for rule in self.last)
        output = self.vocab_size * self.hidden_size if self.tied_embeddings and not is_listed else 0
        return self.num_layers * self.layer_matrix_parameters + last + output

    @property
    def num_parameters(self) -> int:
        """The number of trainable parameters. A tied embedding counts once; vocabulary padding does not count."""
        layer = sum(map(math.prod, self._sizes(self.table.layer)))
        ends = {
            name: self.dims(dims) for rule in (*self.table.first, *self.last) for name, dims in rule.tensors.items()
        }
        return self.num_layers * layer + sum(map(math.prod, ends.values()))

    def _sizes(self, rules: tuple[Rule, ...]) -> Iterator[tuple[int, ...]]:
        return (self.dims(dims) for rule in rules for dims in rule.tensors.values())

    @property
    def why_no_blocks(self) -> str:
        """The reason why the model has no tensor-parallel blocks, for error messages."""
        return self.foreign.reason if self.foreign else f"{self.name} is a {self.family} model"

    def with_layers(self, num_layers: int) -> "ModelShape":
        """Return a copy of the shape with `num_layers` layers."""
        return replace(self, num_layers=num_layers)
