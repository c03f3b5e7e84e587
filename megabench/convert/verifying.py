"""Comparison of transformers with megabench's tensor-parallel blocks on the same tokens in fp32, one layer at a time.

The comparison reads one layer at a time, computes its output, and frees the layer. No process ever holds a whole model.
The comparison therefore works for models that are too large to train on the machine.
"""

import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megabench.config import ResolvedConfig, RunConfig
from megabench.data import DataError
from megabench.data.text import TextPiece
from megabench.data.tokenizer import HuggingFaceTokenizer
from megabench.models.assets import has_tokenizer
from megabench.models.causal_lm import build_model
from megabench.models.mapping import Piece
from megabench.models.model_directory import HuggingFaceWeights
from megabench.models.shape import ModelShape
from megabench.models.weights import Weights
from megabench.specs.megatron import chunk_layers

# tolerance relative to the largest logit; rounding over 100 layers stays below it, and a different model exceeds it
MAX_DIFFERENCE = 1e-4
MAX_KL = 1e-5
SEQ_LENGTH = 128  # number of tokens of each sequence to compare on
_ROWS = 8192  # number of rows of the output layer to read at a time

Advance = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """The differences between the logits of a model and a reference model on the same tokens.

    `max_difference` is the largest absolute difference of logits. `max_logit` is the largest absolute logit of the
    reference. `kl` is the largest Kullback-Leibler divergence over all token positions, in nats. `agreement` is the
    fraction of positions at which both models predict the same most likely token.
    """

    num_tokens: int
    max_difference: float
    max_logit: float
    kl: float
    agreement: float

    @property
    def is_equal(self) -> bool:
        """Whether the logits differ by no more than rounding. Non-finite differences count as unequal."""
        return self.max_difference <= MAX_DIFFERENCE * max(1.0, self.max_logit) and self.kl <= MAX_KL


def sample_tokens(folder: Path, shape: ModelShape) -> Tensor:
    """Return two sequences of tokens, int64 [2, S].

    The first sequence is English text and code, tokenized with the tokenizer in `folder`, or as bytes if `folder` has
    no tokenizer that transformers can load. The second sequence contains random tokens and the first and last token of
    the vocabulary.
    """
    text = Path(textwrap.__file__).read_bytes()
    ids = torch.tensor(list(text[:SEQ_LENGTH]))
    if has_tokenizer(folder):
        with suppress(DataError):  # some tokenizers need packages that megabench does not install
            tokenized = HuggingFaceTokenizer(folder).encode(TextPiece(text, "textwrap.py", True, len(text)))
            ids = torch.from_numpy(tokenized[:SEQ_LENGTH])
    anywhere = torch.randint(shape.vocab_size, (SEQ_LENGTH,), generator=torch.Generator().manual_seed(0))
    anywhere[0], anywhere[-1] = 0, shape.vocab_size - 1
    return torch.stack([ids % shape.vocab_size, anywhere])


def comparison_run(model: str, tp: int, pp: int) -> ResolvedConfig:
    """Return the configuration for comparing tensor-parallel blocks.

    Raises:
        LayoutError: `tp` or `pp` does not fit the model.
    """
    fields: dict[str, Any] = {"model": model, "tp": tp, "pp": pp, "seq_length": SEQ_LENGTH, "kernels": "reference"}
    fields |= {"micro_batch": 1, "global_batch": 1, "precision": "fp32", "device": "cpu"}
    return RunConfig.parse(fields).resolve(tp * pp, "cpu")


def num_parts(run: ResolvedConfig) -> int:
    """Return the number of progress updates that a comparison reports on rank 0, which is in the first stage."""
    first_stage = chunk_layers(run)[0][0]
    return len(first_stage) + run.shape.num_layers + 4


@torch.no_grad()
def compare(
    reference: HuggingFaceWeights, weights: Weights, advance: Advance, *, run: ResolvedConfig, tokens: Tensor
) -> Comparison:
    """Compare the logits of transformers on `reference` with those of the tensor-parallel blocks on `weights`.

    `tokens` has shape [B, S]. All tp·pp ranks of the layout of `run` must call the function, and all ranks get the same
    result. Each part of the comparison calls `advance` with a description of the part.
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
    """Compare the logits `ours` with the reference logits `theirs`, both of shape [B, S, V]."""
    kl, same, largest = 0.0, 0, 0.0
    for one, other in zip(theirs, ours, strict=True):  # one sequence at a time, because logits need much memory
        expected, found = one.double().log_softmax(-1), other.double().log_softmax(-1)
        kl = _worst(kl, F.kl_div(found, expected, log_target=True, reduction="none").sum(-1).max().item())
        largest = _worst(largest, (one - other).abs().max().item())
        same += int((one.argmax(-1) == other.argmax(-1)).sum())
    num_tokens = theirs.shape[0] * theirs.shape[1]
    return Comparison(num_tokens, largest, theirs.abs().max().item(), kl, same / num_tokens)


def _worst(one: float, other: float) -> float:
    return max(one, other) if other == other else other


def _reference_logits(weights: HuggingFaceWeights, tokens: Tensor, advance: Advance) -> Tensor:
    """Compute logits [B, S, V] with transformers, which reads config.json and uses the tensor names in the files."""
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
    """Return a transformers model with one layer and without weights."""
    from transformers import AutoConfig

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
    """Embed tokens: [B, S] -> [B, S, H]. Only the embedding rows of `tokens` are read."""
    ids, positions = tokens.unique(return_inverse=True)
    width = (0, weights.shape.hidden_size)
    rows = [weights.read(Piece(name, (token, token + 1), width)).float() for token in ids.tolist()]
    return torch.cat(rows)[positions]


def _fill(module: nn.Module, weights: HuggingFaceWeights, prefix: str) -> None:
    """Load the parameters of a module from `weights` in fp32. Tensor names are `prefix` plus the parameter name."""
    state = {}
    for name, parameter in module.named_parameters():
        columns = (0, parameter.shape[1]) if parameter.ndim == 2 else None
        state[name] = weights.read(Piece(prefix + name, (0, parameter.shape[0]), columns)).float()
    module.load_state_dict(state, strict=True, assign=True)


def _parallel_logits(weights: Weights, run: ResolvedConfig, tokens: Tensor, advance: Advance) -> Tensor | None:
    """Compute logits [B, S, V] with the tensor-parallel blocks. Return them on rank 0, and None on all other ranks.

    Each pipeline stage runs its layers and sends the hidden states to the next stage.
    """
    from megabench.engines.megatron.parts import Parts  # imports megatron-core, which takes seconds

    blocks = Parts(weights, run)
    groups, shape = blocks.groups, run.shape
    stage, num_stages = groups.pp.rank(), groups.pp.size()
    layers = chunk_layers(run)[stage][0]
    if stage == 0:
        hidden = blocks.embed(tokens)
        advance("tensor-parallel blocks: embedding")
    else:
        hidden = blocks.empty(tokens)
        dist.recv(hidden, dist.get_global_rank(groups.pp, stage - 1))
    for number in layers:
        hidden = blocks.layer(number, hidden)
        advance(f"tensor-parallel blocks: layer {number + 1} of {shape.num_layers}")
    if stage < num_stages - 1:
        dist.send(hidden.contiguous(), dist.get_global_rank(groups.pp, stage + 1))
    logits = blocks.head(hidden) if stage == num_stages - 1 else None
    advance("tensor-parallel blocks: output layer")
    # the first rank of the last pipeline stage has the logits of the whole vocabulary
    last = dist.get_world_size() - groups.tp.size()
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
