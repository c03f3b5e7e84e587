"""The input of a prediction: the work of a step, the training program, and a candidate layout. Loads no torch."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal, Protocol, Self

from megabench.metrics import flops_per_token, output_layer_cost
from megabench.models.shape import ModelShape
from megabench.optim.optimizers import OPTIMIZERS
from megabench.parallel.layout import Layout
from megabench.parallel.placement import Policy
from megabench.precision import POLICIES, Fp8Recipe

Recompute = Literal["none", "selective", "full"]
FUSED_LOSS_CHUNK = 2**28  # elements of logits per chunk, as in engines/common/cross_entropy.py
Product = Literal["forward", "input_gradient", "weight_gradient"]


Copies = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Stack:
    """Kernels and options of megabench's engines that affect the cost. The defaults are those on GPUs.

    - `flash_attention`: no S×S scores are stored. Otherwise the full square is written and read in 16 bits.
    - `exchanges_heads`: if cp divides the heads, context parallelism exchanges them with all-to-alls, so that each rank
      has the whole sequence of some heads. Otherwise, each rank has a chunk of the sequence.
    - `fused`: element-wise kernels are fused, and read and write their tensors once.
    - `fused_loss`: the output layer and cross-entropy are computed in chunks.
    - `adds_output_gradient`: the products of the fused loss add the output layer's gradient to the gradient buffer.
    - `fuses_weight_gradient`, and `fuses_fp8_weight_gradient` in fp8: the products of the other layers do so as well.
    - `copies`: copy engines exchange the activations of tensor parallelism over NVLink: where this is faster, always,
      or never.
    - `keeps_gathered`: inputs of tensor-parallel layers are not gathered again for backward.
    - `keeps_transposed`: kept fp8 weights are kept transposed as well, and not transposed in each backward pass.
    - `stages`: stages have equal numbers of layers, or fewer next to the output layer.
    """

    flash_attention: bool = True
    exchanges_heads: bool = True
    fused: bool = True
    fused_loss: bool = True
    adds_output_gradient: bool = True
    fuses_weight_gradient: bool = True
    fuses_fp8_weight_gradient: bool = False
    copies: Copies = "auto"
    keeps_gathered: bool = False
    keeps_transposed: bool = True
    stages: Literal["balanced", "even"] = "balanced"


@lru_cache(maxsize=4096)
def _chunk_layers(num_layers: int, output_cost: float, pp: int, vp: int) -> tuple[tuple[int, ...], ...]:
    stages = Layout(pp=pp, vp=vp).chunk_layers(num_layers, output_cost)
    return tuple(tuple(map(len, stage)) for stage in stages)


@dataclass(frozen=True)
class Job:
    """The work of one optimizer step.

    `bytes_of_gradient` is the size of one gradient element: 4 for fp32, 2 for bf16. All layers of an fp8 run cost the
    mean of its fp8 and bf16 layers, wherever the bf16 layers are.
    """

    shape: ModelShape
    seq_length: int
    global_batch: int
    precision: str = "bf16"
    bytes_of_gradient: int = 4
    fp8_recipe: Fp8Recipe = "tensorwise"
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    optimizer: str = "adamw"
    stack: Stack = field(default_factory=Stack)

    def exchanges_heads(self, tp: int, cp: int) -> bool:
        """Return whether context parallelism exchanges heads, which needs enough KV heads for all ranks."""
        return cp > 1 and self.stack.exchanges_heads and self.shape.num_kv_heads % (tp * cp) == 0

    @cached_property
    def ffn_matrices(self) -> int:
        """The number of H × F matrices in a layer: three with a gate, two without."""
        shape = self.shape
        attention = shape.hidden_size * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
        return round((self.layer_parameters - attention) / (shape.hidden_size * shape.ffn_size))

    @cached_property
    def layer_parameters(self) -> int:
        """Of one layer's matrices."""
        return self.shape.layer_matrix_parameters

    @cached_property
    def layer_tensors(self) -> int:
        """The number of parameter tensors of a layer."""
        return sum(len(rule.tensors) for rule in self.shape.table.layer)

    @cached_property
    def num_parameters(self) -> int:
        return self.shape.num_parameters

    @cached_property
    def embedding_parameters(self) -> int:
        return self.shape.vocab_size * self.shape.hidden_size

    @cached_property
    def output_cost(self) -> float:
        """The cost of the output layer as a multiple of a layer, for dividing layers among stages."""
        return output_layer_cost(self.shape, self.seq_length) if self.stack.stages == "balanced" else 0.0

    def chunk_layers(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        """Return the number of layers of each model chunk, as [stage][chunk]."""
        return _chunk_layers(self.shape.num_layers, self.output_cost, layout.pp, layout.vp)

    @cached_property
    def flops_per_token(self) -> float:
        """Useful training FLOPs per token, with causal attention."""
        return flops_per_token(self.shape, self.seq_length).causal

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq_length

    @cached_property
    def hidden_share(self) -> float:
        """The share of the parameters that are in matrices of layers."""
        return self.shape.num_layers * self.layer_parameters / self.num_parameters

    @cached_property
    def update_products(self) -> list[tuple[int, int, int]]:
        """The (m, n, k) of the matrix products with which the optimizer updates one layer."""
        products = OPTIMIZERS[self.optimizer].products
        return [product for rows, columns in self.shape.layer_matrices for product in products(rows, columns)]

    def mean_bytes(self, bytes_of_parameter: tuple[float, float]) -> float:
        """Return the mean of bytes per parameter of hidden matrices and of other parameters."""
        hidden, other = bytes_of_parameter
        return other + self.hidden_share * (hidden - other)

    @property
    def bytes_of_moments(self) -> float:
        """Bytes per parameter of the optimizer's moments. Adafactor's sums per row and column are neglected."""
        return self.mean_bytes(OPTIMIZERS[self.optimizer].state_bytes)

    @property
    def bytes_of_state(self) -> float:
        """Bytes per parameter of the optimizer: its moments and any fp32 master weight."""
        return self.bytes_of_moments + 4 * POLICIES[self.precision].has_masters

    def fp8_share(self, product: Product) -> float:
        """Return the share of the layers whose linear layers compute this product in fp8, from 0 to 1."""
        in_fp8 = self.has_fp8_products if product == "forward" else self.has_fp8_gradients
        num_bf16_layers = self.num_layers_at_start_in_bf16 + self.num_layers_at_end_in_bf16
        return 1 - num_bf16_layers / self.shape.num_layers if in_fp8 else 0.0

    @property
    def adds_output_gradient(self) -> bool:
        """Whether products add the output layer's gradient to its buffer.

        They do not if the embedding has the same weight, if the loss is scaled, or if the buffer is in 16 bits.
        """
        policy, is_tied = POLICIES[self.precision], self.shape.tied_embeddings
        possible = not is_tied and not policy.scales_loss and self.bytes_of_gradient == 4
        return possible and self.stack.adds_output_gradient

    def without_added_gradients(self) -> Self:
        """Return the job in a program whose products write gradients instead of adding to a buffer."""
        plain = replace(
            self.stack, adds_output_gradient=False, fuses_weight_gradient=False, fuses_fp8_weight_gradient=False
        )
        return replace(self, stack=plain)

    @property
    def has_fp8_products(self) -> bool:
        """Whether the linear layers of the blocks have fp8 products."""
        return POLICIES[self.precision].has_fp8_products

    @property
    def has_fp8_gradients(self) -> bool:
        """Whether the products of these layers' backward pass are in fp8, too."""
        return self.has_fp8_products and self.fp8_recipe == "tensorwise"

    @property
    def block_parameters(self) -> int:
        """The number of parameters of the matrices of all blocks."""
        return self.shape.num_layers * self.layer_parameters

    @property
    def bytes_of_value(self) -> int:
        """The number of bytes of a weight or an activation."""
        return POLICIES[self.precision].bytes_of_value


class Variant(Protocol):
    """Engine-specific settings of a candidate, as a frozen dataclass that the engine declares in specs/."""

    def prefix(self, engine: str) -> str:
        """Return the first part of a candidate's name, e.g. "zero3·"."""
        ...

    @property
    def words(self) -> list[str]:
        """Last words of a candidate's name, e.g. ["hpz8"]."""
        ...

    @property
    def kind(self) -> Hashable:
        """The plan shows the fastest candidate of each data-parallel engine and kind."""
        ...


@dataclass(frozen=True)
class Candidate:
    """One way to run a job. `is_compiled` is whether torch.compile compiles the blocks, which matters only in fp8."""

    engine: str
    layout: Layout
    micro_batch: int
    variant: Variant
    recompute: Recompute = "none"
    placement: Policy = "topology"
    is_compiled: bool = False

    @property
    def name(self) -> str:
        """The name of the candidate, e.g. "tp8·pp2·dp2 mb1" or "zero3·dp32 mb2 full"."""
        words = [f"{self.variant.prefix(self.engine)}{self.layout}", f"mb{self.micro_batch}"]
        words += [self.recompute] * (self.recompute != "none")
        words += [self.placement] * (self.placement != "topology")
        return " ".join([*words, *self.variant.words])

    def num_micro_batches(self, job: Job) -> int:
        """Return the number of micro-batches per replica and step."""
        return job.global_batch // (self.micro_batch * self.layout.data_parallel)
