"""ModelShape: the sizes of a model, from which its tensors, FLOPs and memory follow. Loads no torch."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megabench.models.families import FAMILIES, OUTPUT, Dims, Family, Rule


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary embedding's slow frequencies; transformers' rope_type "llama3"."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Foreign:
    """A model that no table describes, for the engines that train transformers models.

    `table` lists its tensors, `config_folder` has its config.json, `reason` says why it has no parallel blocks.
    """

    table: Family
    config_folder: str
    reason: str


@dataclass(frozen=True)
class ModelShape:
    """A decoder of one of the families of families.py, which says what its blocks are made of.

    `rope_theta` is None, and `num_positions` is not, where positions are learned. `seq_length`, `micro_batch`,
    `global_batch`, `learning_rate` and `lr_warmup` (steps) are defaults that a run may override.
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
    foreign: Foreign | None = None

    @property
    def table(self) -> Family:
        """Its tensors: those of its family, or its own."""
        return self.foreign.table if self.foreign else FAMILIES[self.family]

    @property
    def last(self) -> tuple[Rule, ...]:
        """The rules behind the layers: a tied output layer is made of the embedding."""
        rules = self.table.last
        if self.tied_embeddings:
            rules = tuple(
                replace(rule, tensors={self.table.embedding: "v h"}) if rule.parameter == OUTPUT else rule
                for rule in rules
            )
        return rules

    def dims(self, dims: Dims) -> tuple[int, ...]:
        """The shape that a table writes as `dims`."""
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
    def layer_matrix_parameters(self) -> int:
        """Parameters of one layer that take part in matrix products."""
        return sum(math.prod(size) for size in self._sizes(self.table.layer) if len(size) > 1)

    @property
    def matrix_parameters(self) -> int:
        """Parameters in matrix products: all layers and the output layer; embedding look-up and norms excluded."""
        last = sum(math.prod(size) for size in self._sizes(self.last) if len(size) > 1)
        is_listed = any(self.table.embedding in rule.tensors for rule in self.last)
        output = self.vocab_size * self.hidden_size if self.tied_embeddings and not is_listed else 0
        return self.num_layers * self.layer_matrix_parameters + last + output

    @property
    def num_parameters(self) -> int:
        """All trainable parameters, embedding and norms included, a tied embedding once, vocabulary padding not."""
        layer = sum(map(math.prod, self._sizes(self.table.layer)))
        ends = {
            name: self.dims(dims) for rule in (*self.table.first, *self.last) for name, dims in rule.tensors.items()
        }
        return self.num_layers * layer + sum(map(math.prod, ends.values()))

    def _sizes(self, rules: tuple[Rule, ...]) -> Iterator[tuple[int, ...]]:
        return (self.dims(dims) for rule in rules for dims in rule.tensors.values())

    @property
    def why_no_blocks(self) -> str:
        """Of a model whose table has no parallel blocks."""
        return self.foreign.reason if self.foreign else f"{self.name} is a {self.family} model"

    def with_layers(self, num_layers: int) -> "ModelShape":
        """The same width with another depth."""
        return replace(self, num_layers=num_layers)
