"""Models that megabench knows only through transformers: their tensors, and the reasons not to train some of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabench.models.causal_lm import (
    CONFIG_NAME,
    UnsupportedModelError,
    build_model,
    persistent_buffers,
    reason_of,
    training_config,
)
from megabench.models.families import Family, Rule
from megabench.models.shape import Foreign, ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Causal language models of transformers in which tokens attend to later tokens whatever the configuration says.
_NOT_CAUSAL = ("cpmant", "xlnet")
# Causal language models of transformers that draw random numbers or need other inputs than tokens.
_NOT_DETERMINISTIC = {"reformer": "hashes with random numbers", "xmod": "needs the language of every sequence"}


def foreign_shape(folder: Path, common: dict[str, Any], reason: str) -> ModelShape:
    """Return the shape of a model that only transformers can compute.

    `common` are the fields of the shape that config.json determines, and `reason` explains why megabench has no
    tensor-parallel blocks for the model. Raise UnsupportedModelError if the model cannot be trained exactly.
    """
    import torch
    from torch import nn
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    path = folder / CONFIG_NAME
    config = training_config(folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{path}: transformers has no causal language model for model_type={config.model_type!r}. Use another "
            f"model."
        )
    try:
        with torch.device("meta"):
            model = build_model(config)
    except Exception as error:  # transformers raises many types of exceptions
        reason = _unknown_rope_type(config) or reason_of(error)
        raise UnsupportedModelError(
            f"{path}: transformers cannot build a causal language model ({reason}). Correct {path}."
        ) from None
    _check_model(model, path)
    sizes = {name: " ".join(map(str, parameter.shape)) for name, parameter in model.named_parameters()}
    embedding = next(n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    looked_up = [n for n, module in model.named_modules() if isinstance(module, nn.Embedding)]
    first = [embedding, *(name for name in sizes if name.rpartition(".")[0] in looked_up and name != embedding)]
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    layers = max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))
    num_positions = _num_positions(model)
    head = model.get_output_embeddings()
    # without an output layer of its own, a model multiplies with the embedding or with another parameter
    has_tied_output = head is None or head.weight is model.get_input_embeddings().weight
    common = common | {"tied_embeddings": has_tied_output}
    table = Family(
        name=common["family"],
        layer_prefix=f"{layers}.",
        first=(Rule(None, {name: sizes[name] for name in first}, "whole"),),
        layer=(),
        last=(Rule(None, {name: size for name, size in sizes.items() if name not in first}, "whole"),),
        residual=(),
        positions="learned" if num_positions else "rotary",
    )
    if num_positions:
        num_positions = min(num_positions, common["num_positions"])
        common = common | {"num_positions": num_positions, "seq_length": min(num_positions, common["seq_length"])}
    buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(model).items()}
    return ModelShape(**common, norm_eps=0.0, foreign=Foreign(table, buffers, str(folder), reason))


def check_is_causal(config: "PreTrainedConfig", path: Path) -> None:
    """Raise UnsupportedModelError for a configuration whose tokens attend to later tokens, or that is random."""
    family = config.model_type
    if family in _NOT_DETERMINISTIC:
        raise UnsupportedModelError(
            f"{path}: model_type={family!r} {_NOT_DETERMINISTIC[family]}, so that engines cannot be compared. "
            f"Use another model."
        )
    field = next((name for name in ("is_causal", "causal") if getattr(config, name, True) is False), None)
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        field = "use_bidirectional_attention"
    if field or family in _NOT_CAUSAL:
        what = f"{field}={getattr(config, field)!r}" if field else f"model_type={family!r}"
        raise UnsupportedModelError(f"{path}: {_bidirectional(what)}")


def _unknown_rope_type(config: "PreTrainedConfig") -> str | None:
    """Return a clause about a rotary embedding that transformers does not know, or None."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    known = ["default", *sorted(ROPE_INIT_FUNCTIONS)]
    return f"rope_type={kind!r} is unknown; known types: {', '.join(known)}" if kind and kind not in known else None


def _bidirectional(what: str) -> str:
    return (
        f"{what} means attention to later tokens, which would let the model see the tokens that it must predict. "
        f"Use a causal language model."
    )


def _check_model(model: "PreTrainedModel", path: Path) -> None:
    """Raise UnsupportedModelError for a model, on the meta device, that megabench cannot train exactly."""
    names = [name for name, _ in model.named_parameters()]
    if experts := next((name for name in names if "expert" in name), None):
        raise UnsupportedModelError(
            f"{path}: mixtures of experts are not supported (parameter {experts}). Use a dense model."
        )
    if any(getattr(m, "is_decoder", True) is False and not getattr(m, "causal", False) for m in model.modules()):
        raise UnsupportedModelError(
            f"{path}: {type(model).__name__} is an encoder: {_bidirectional('is_decoder=False')} "
            f"An encoder that was trained as a decoder needs is_decoder=true in {CONFIG_NAME}."
        )
    for name, buffer in persistent_buffers(model).items():
        if not buffer.is_floating_point():
            raise UnsupportedModelError(
                f"{path}: the model stores the buffer {name} in {str(buffer.dtype).removeprefix('torch.')}, and "
                f"checkpoints of megabench contain only floating-point numbers. Use another model."
            )
    if unused := _unused_parameters(model):
        raise UnsupportedModelError(f"{path}: {unused_words(unused)}")


def unused_words(names: list[str]) -> str:
    """Explain why a model with these parameters, which get no gradient, cannot be trained."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"the parameter {names[0]}{more} has no gradient in causal language modeling, for example because it belongs "
        f"to the cross-attention of an encoder-decoder. Use a model that uses all of its parameters."
    )


def _unused_parameters(model: "PreTrainedModel") -> list[str]:
    """Return the parameters that get no gradient, from a forward and backward pass on the meta device.

    The result is empty for a model whose computation depends on values, which the meta device does not have. DDP and
    FSDP2 find unused parameters of such a model in the first step.
    """
    import torch

    tokens = torch.zeros(1, 8, dtype=torch.long, device="meta")
    mask = torch.zeros(1, 1, 8, 8, device="meta")
    for arguments in ({"attention_mask": mask}, {}):  # most models look at values to create a mask, others create none
        try:
            model(input_ids=tokens, use_cache=False, **arguments).logits.sum().backward()
        except Exception:
            continue
        unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        model.zero_grad()
        return unused
    return []


def _num_positions(model: "PreTrainedModel") -> int | None:
    """Return the length of the model's shortest table of positions, or None if the model has none."""
    from torch import nn

    tokens = model.get_input_embeddings()
    lengths = [
        # the table of RoBERTa starts after the row of the padding token
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module is not tokens and _is_position(name)
    ]
    lengths += [
        len(buffer)
        for name, buffer in model.named_buffers()
        if _is_position(name) and buffer.ndim == 2 and buffer.is_floating_point()
    ]
    if length := getattr(model.config, "max_seq_len", None):  # MPT computes its ALiBi table for this length
        lengths.append(length)
    return min(lengths, default=None)


def _is_position(name: str) -> bool:
    last = name.rpartition(".")[2]
    return "pos" in last or last == "wpe"
