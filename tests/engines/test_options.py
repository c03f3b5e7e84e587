"""The engines' own settings: what changes no result is equal to one process, what is lossy has a class of its own."""

import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from megabench.config import ConfigError, ResolvedConfig
from megabench.data.batch import Batch, micro_batches
from megabench.data.source import open_source
from megabench.engines.build import build_engine
from megabench.engines.common.optim import LossScale
from megabench.optim.optimizers import OPTIMIZERS as TABLE
from megabench.precision import INITIAL_LOSS_SCALE, LOSS_SCALE_HYSTERESIS, LOSS_SCALE_WINDOW
from tests import distributed
from tests.engines.cases import cases
from tests.engines.equivalence import (
    OPTIMIZERS,
    TOLERANCE,
    Trace,
    assert_equal_to_reference,
    differences,
    reference_of,
    relative_difference,
    resolve,
    train,
)
from tests.engines.reference import GROUPS_WITHOUT_BETAS, PARAM_GROUPS
from tests.exhaustive import with_representatives

IN_CI = (
    *("zero2-reduce", "zero2-offload", "zero3-offload-all", "zero3-hpz", "zero3-leaf", "zero3-tuned"),
    *("fsdp-offload", "ddp-compile", "megatron-fsdp-across", "megatron-fsdp-ones"),
)
EQUAL: dict[str, tuple[int, dict[str, Any]]] = cases("OPTIONS")


@pytest.mark.distributed
@pytest.mark.parametrize("option", with_representatives(EQUAL, *IN_CI))
def test_what_changes_no_result(option: str) -> None:
    world_size, fields = EQUAL[option]
    assert_equal_to_reference(world_size, **fields, **OPTIMIZERS["adamw"])


@pytest.mark.distributed
@pytest.mark.parametrize("fields", cases("PARAM_GROUPS").values(), ids=str)
def test_parameter_groups(fields: dict[str, Any]) -> None:
    """The negative control: without the groups, the weights are visibly others."""
    fields = {**fields, **OPTIMIZERS["adamw"]}
    assert_equal_to_reference(2, **fields, param_groups=PARAM_GROUPS)
    plain = reference_of(**fields).weights
    grouped = reference_of(**fields, param_groups=PARAM_GROUPS).weights
    for name in plain:
        if re.search("embed|norm|mlp", name):
            assert relative_difference(plain[name], grouped[name]) > 10 * TOLERANCE, name


@pytest.mark.distributed
@pytest.mark.parametrize("optimizer", TABLE)
def test_parameter_groups_of_every_optimizer(optimizer: str) -> None:
    fields: dict[str, Any] = {"engine": "ddp", "optimizer": optimizer, "lr": 1e-2}
    assert_equal_to_reference(2, **fields, param_groups=GROUPS_WITHOUT_BETAS)


@pytest.mark.distributed
@pytest.mark.parametrize("optimizer", [name for name, entry in TABLE.items() if entry.needs_matrices])
@pytest.mark.parametrize("fields", cases("WHOLE_MATRICES").values(), ids=str)
def test_optimizers_of_whole_matrices(fields: dict[str, Any], optimizer: str) -> None:
    assert_equal_to_reference(2, **fields, optimizer=optimizer, lr=1e-2)


def gradients_kept(run: ResolvedConfig) -> int:
    """How many of a step's gradients an engine still holds when the next one computes."""
    engine: Any = build_engine(run, torch.device("cpu"))
    source = open_source(run)
    engine.train_step(micro_batches(source, run, dist.get_rank(), 0), run.lr)
    kept: list[int] = []

    class Spied(list[Batch]):
        def __iter__(self) -> Iterator[Batch]:
            parameters = [*engine.shards.values(), *engine.model.parameters()]
            kept.append(sum(parameter.grad is not None for parameter in parameters))
            yield from super().__iter__()

    engine.accumulate(Spied(micro_batches(source, run, dist.get_rank(), 1)))
    return kept[0]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "fields", [{"engine": "fsdp"}, {"engine": "megatron_fsdp", "precision": "bf16", "grad_dtype": "bf16"}], ids=str
)
def test_fsdp_holds_gradients_once(fields: dict[str, Any]) -> None:
    assert distributed.run(gradients_kept, 2, resolve(2, num_layers=1, **fields)) == [0, 0]


def test_the_loss_scale_moves() -> None:
    scale = LossScale()
    for _ in range(LOSS_SCALE_HYSTERESIS - 1):
        scale.update(is_finite=False)
    assert scale.value == INITIAL_LOSS_SCALE
    scale.update(is_finite=False)
    assert scale.value == INITIAL_LOSS_SCALE / 2
    for _ in range(LOSS_SCALE_WINDOW):
        scale.update(is_finite=True)
    assert scale.value == INITIAL_LOSS_SCALE
    scale.update(is_finite=False)
    assert scale.value == INITIAL_LOSS_SCALE, "patient again after a window without"
    other = LossScale()
    other.restore(scale.state())
    assert other == scale


def train_scaled(run: ResolvedConfig) -> Trace:
    """Trains in fp32 with fp16's loss scale, which must not show."""

    from megabench.engines.common import transformers_engine

    with patch.object(transformers_engine, "loss_scale_of", lambda run: LossScale()):
        return train(run)


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "fields"), [(2, {}), (4, {"cp": 2, "pp": 2})], ids=["dp2", "pp2-cp2"])
def test_megatron_in_fp16(world_size: int, fields: dict[str, Any]) -> None:
    """Its loss is scaled and divided by micro-batches, its gradients are divided by replicas and unscaled."""
    settings = fields | OPTIMIZERS["adamw"]
    # which a user may ask for on GPUs alone
    run = resolve(world_size, **settings).model_copy(update={"precision": "fp16"})
    found = differences(distributed.run(train, world_size, run)[0], reference_of(**settings))
    assert max(value for name, value in found.items() if name.startswith("gradients")) < 5e-3


@pytest.mark.distributed
def test_the_loss_scale_of_fsdp_does_not_show() -> None:
    assert_equal_to_reference(2, job=train_scaled, engine="fsdp", **OPTIMIZERS["adamw"])


def fsdp_units(run: ResolvedConfig) -> list[str]:
    engine: Any = build_engine(run, torch.device("cpu"))
    return [name for name, module in engine.model.named_modules() if isinstance(module, FSDPModule)]


@pytest.mark.distributed
def test_fsdp_gathers_the_output_layer_by_itself() -> None:
    """So that it is gathered beside blocks, and its gradient reduced before theirs; a tied one is with the rest."""
    own, tied = (resolve(2, engine="fsdp", num_layers=1, model=model) for model in ("llama-tiny", "gpt2-tiny"))
    assert tied.shape.tied_embeddings
    assert sorted(distributed.run(fsdp_units, 2, own)[0]) == ["", "lm_head", "model.embed_tokens", "model.layers.0"]
    assert sorted(distributed.run(fsdp_units, 2, tied)[0]) == ["", "transformer.h.0"]


@pytest.mark.parametrize(("fields", "words"), cases("REFUSED").values(), ids=str)
def test_what_cannot_be_combined(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(4, **fields)
