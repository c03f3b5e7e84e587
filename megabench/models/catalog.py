"""Named model shapes, each with the defaults that belong to it. Loads no torch."""

from dataclasses import dataclass, replace
from difflib import get_close_matches

from megabench import UserError


class UnknownModelError(UserError):
    """The model is not in the catalogue."""


@dataclass(frozen=True)
class ModelShape:
    """A Llama-family decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, no biases, untied output.

    `seq_length`, `micro_batch`, `global_batch`, `learning_rate` and `lr_warmup` (steps) are defaults that a run may
    override.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    seq_length: int
    micro_batch: int
    global_batch: int
    learning_rate: float
    lr_warmup: int
    source: str

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of one layer that take part in matrix products."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.ffn_size

    @property
    def matrix_parameters(self) -> int:
        """Parameters in matrix products: all layers and the output layer; embedding look-up and norms excluded."""
        return self.num_layers * self.layer_matrix_parameters + self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All trainable parameters, embedding and norms included, vocabulary padding excluded."""
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.matrix_parameters + self.vocab_size * self.hidden_size + norms

    def with_layers(self, num_layers: int) -> "ModelShape":
        """The same width with another depth."""
        return replace(self, num_layers=num_layers)


_SHAPES = (
    ModelShape(
        name="llama-tiny",
        num_layers=8, hidden_size=128, num_heads=8, num_kv_heads=4, head_dim=16, ffn_size=384, vocab_size=512,
        rope_theta=500_000.0, norm_eps=1e-5,
        seq_length=256, micro_batch=4, global_batch=16, learning_rate=3e-3, lr_warmup=10,
        source="megabench: small enough for 8 processes on 2 cores; every layout up to tp 4 and pp·vp 8 divides it",
    ),
    ModelShape(
        name="llama3-8b",
        num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128256,
        rope_theta=500_000.0, norm_eps=1e-5,
        seq_length=8192, micro_batch=1, global_batch=32, learning_rate=3e-4, lr_warmup=2000,
        source="Llama 3 model card and config.json of Meta-Llama-3-8B; learning rate: arXiv 2407.21783 table 3; "
        "warm-up: arXiv 2307.09288",
    ),
    ModelShape(
        name="llama3-70b",
        num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128, ffn_size=28672, vocab_size=128256,
        rope_theta=500_000.0, norm_eps=1e-5,
        seq_length=8192, micro_batch=1, global_batch=64, learning_rate=1.5e-4, lr_warmup=2000,
        source="Llama 3 model card and config.json of Meta-Llama-3-70B; learning rate: arXiv 2407.21783 table 3; "
        "warm-up: arXiv 2307.09288",
    ),
)  # fmt: skip

CATALOG = {shape.name: shape for shape in _SHAPES}


def get_model(name: str) -> ModelShape:
    """The shape called `name`; UnknownModelError names near matches."""
    if name in CATALOG:
        return CATALOG[name]
    near = get_close_matches(name, CATALOG, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known models: {', '.join(CATALOG)}"
    raise UnknownModelError(f"unknown model {name!r}; {hint}")
