"""The proof: transformers and the parallel blocks on the same tokens, in fp32, one layer at a time.

Neither side ever holds a whole model: a layer is read, used and dropped. So the largest models can be compared on a
machine that could not train them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig

from megabench.config import ResolvedConfig, RunConfig
from megabench.convert.samples import SEQ_LENGTH
from megabench.engines.megatron.parts import Parts
from megabench.models.hugging_face import build_model
from megabench.models.mapping import Piece
from megabench.models.model_directory import HuggingFaceWeights
from megabench.models.weights import Weights
from megabench.specs.megatron import chunk_layers

# relative to the largest logit; rounding of a hundred layers stays below, another model does not
MAX_DIFFERENCE = 1e-4
MAX_KL = 1e-5
_ROWS = 8192  # of the output layer at a time

Advance = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """How the logits of two models differ on the same tokens, the second against the first.

    `max_difference` is the largest absolute difference, `max_logit` the largest absolute logit, `kl` the largest
    Kullback-Leibler divergence of a token's prediction in nats, `agreement` the share of tokens whose most likely
    successor is the same.
    """

    num_tokens: int
    max_difference: float
    max_logit: float
    kl: float
    agreement: float

    @property
    def is_equal(self) -> bool:
        """Whether the difference is rounding; a figure that is not finite is none."""
        return self.max_difference <= MAX_DIFFERENCE * max(1.0, self.max_logit) and self.kl <= MAX_KL


def comparison_run(model: str, tp: int, pp: int) -> ResolvedConfig:
    """The configuration under which blocks are compared; LayoutError where tp and pp do not fit the model."""
    fields: dict[str, Any] = {"model": model, "tp": tp, "pp": pp, "seq_length": SEQ_LENGTH, "kernels": "reference"}
    fields |= {"micro_batch": 1, "global_batch": 1, "precision": "fp32", "device": "cpu"}
    return RunConfig.parse(fields).resolve(tp * pp, "cpu")


def num_parts(run: ResolvedConfig) -> int:
    """How often a comparison advances on rank 0, whose stage is the first."""
    first_stage = chunk_layers(run)[0][0]
    return len(first_stage) + run.shape.num_layers + 4


@torch.no_grad()
def compare(
    reference: HuggingFaceWeights, weights: Weights, advance: Advance, *, run: ResolvedConfig, tokens: Tensor
) -> Comparison:
    """Compares transformers on `reference` with the parallel blocks of `run`'s layout on `weights`; tokens [B, S].

    Collective over the tp·pp ranks; the same on all of them. `advance` is called on rank 0 with what was done.
    """
    ours = _parallel_logits(weights, run, tokens, advance)
    verdict: list[Comparison | None] = [None]
    if dist.get_rank() == 0:
        assert ours is not None
        verdict = [difference(_reference_logits(reference, tokens, advance), ours)]
    dist.broadcast_object_list(verdict)
    assert verdict[0] is not None
    return verdict[0]


def difference(theirs: Tensor, ours: Tensor) -> Comparison:
    """How logits [B, S, V] differ from those of the reference."""
    kl, same, largest = 0.0, 0, 0.0
    for one, other in zip(theirs, ours, strict=True):  # a sequence at a time: predictions are as wide as the vocabulary
        expected, found = one.double().log_softmax(-1), other.double().log_softmax(-1)
        kl = _worst(kl, F.kl_div(found, expected, log_target=True, reduction="none").sum(-1).max().item())
        largest = _worst(largest, (one - other).abs().max().item())
        same += int((one.argmax(-1) == other.argmax(-1)).sum())
    num_tokens = theirs.shape[0] * theirs.shape[1]
    return Comparison(num_tokens, largest, theirs.abs().max().item(), kl, same / num_tokens)


def _worst(one: float, other: float) -> float:
    return max(one, other) if other == other else other


def _reference_logits(weights: HuggingFaceWeights, tokens: Tensor, advance: Advance) -> Tensor:
    """transformers' logits [B, S, V], from its own reading of the configuration and the files' own names."""
    shape, table = weights.shape, weights.shape.table
    model = _one_layer(weights.folder)
    layers = model.get_submodule(table.layer_prefix.rstrip("."))
    norm, model.base_model.norm = model.base_model.norm, nn.Identity()
    hidden = _embed(weights, table.embedding, tokens)
    advance("transformers: embedding")
    for number in range(shape.num_layers):
        _fill(layers[0], weights, f"{table.layer_prefix}{number}.")
        hidden = model.base_model(inputs_embeds=hidden, use_cache=False).last_hidden_state
        advance(f"transformers: layer {number + 1} of {shape.num_layers}")
    _fill(norm, weights, "model.norm.")
    hidden = norm(hidden)
    head = table.embedding if shape.tied_embeddings else "lm_head.weight"
    spans = [(row, min(row + _ROWS, shape.vocab_size)) for row in range(0, shape.vocab_size, _ROWS)]
    parts = [F.linear(hidden, weights.read(Piece(head, span, (0, shape.hidden_size))).float()) for span in spans]
    advance("transformers: output layer")
    return torch.cat(parts, dim=-1)


def _one_layer(folder: Path) -> Any:
    """transformers' model of one layer, without weights."""
    config = AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, attn_implementation="sdpa"
    )
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    with torch.device("meta"):
        model: Any = build_model(config).eval()
    model.base_model.rotary_emb = type(model.base_model.rotary_emb)(config)
    return model


def _embed(weights: HuggingFaceWeights, name: str, tokens: Tensor) -> Tensor:
    """[B, S] -> [B, S, H], reading no more of the embedding than its rows of these tokens."""
    ids, positions = tokens.unique(return_inverse=True)
    width = (0, weights.shape.hidden_size)
    rows = [weights.read(Piece(name, (token, token + 1), width)).float() for token in ids.tolist()]
    return torch.cat(rows)[positions]


def _fill(module: nn.Module, weights: HuggingFaceWeights, prefix: str) -> None:
    """Gives a module its parameters, in fp32, by their names in the files."""
    state = {}
    for name, parameter in module.named_parameters():
        columns = (0, parameter.shape[1]) if parameter.ndim == 2 else None
        state[name] = weights.read(Piece(prefix + name, (0, parameter.shape[0]), columns)).float()
    module.load_state_dict(state, strict=True, assign=True)


def _parallel_logits(weights: Weights, run: ResolvedConfig, tokens: Tensor, advance: Advance) -> Tensor | None:
    """The parallel blocks' logits [B, S, V] on rank 0: each stage runs its layers and hands on what it has."""
    blocks = Parts(weights, run)
    groups, shape = blocks.groups, run.shape
    stage, num_stages = groups.pp.rank(), groups.pp.size()
    layers = chunk_layers(run)[stage][0]
    if stage == 0:
        hidden = blocks.embed(tokens)
        advance("parallel blocks: embedding")
    else:
        hidden = blocks.empty(tokens)
        dist.recv(hidden, dist.get_global_rank(groups.pp, stage - 1))
    for number in layers:
        hidden = blocks.layer(number, hidden)
        advance(f"parallel blocks: layer {number + 1} of {shape.num_layers}")
    if stage < num_stages - 1:
        dist.send(hidden.contiguous(), dist.get_global_rank(groups.pp, stage + 1))
    logits = blocks.head(hidden) if stage == num_stages - 1 else None
    advance("parallel blocks: output layer")
    last = dist.get_world_size() - groups.tp.size()  # the first rank of the last stage has all of the vocabulary
    if last == 0:
        return logits
    if dist.get_rank() == last:
        assert logits is not None
        dist.send(logits.contiguous(), 0)
    if dist.get_rank() == 0:
        logits = torch.empty(*tokens.shape, shape.vocab_size)
        dist.recv(logits, last)
        return logits
    return None
