"""Sketches place errors of parallel engines, which are planted in the processes of a run of two ranks.

The table of docs/comparing.md comes from this file and from tests/test_tensor_parity.py.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megabench.config import ResolvedConfig
from megabench.tensor_parity import TensorParity, compare_files
from tests import test_tensor_parity
from tests.test_tensor_parity import Series, Sketched, print_row, seen_by_losses, train

pytestmark = pytest.mark.distributed

QWEN2 = {"model": "qwen2-tiny", "num_layers": 4}  # tied embeddings, and biases of queries, keys and values
BLOCK = "decoder.layers.1."  # megatron-core's name of the layer model.layers.1
LAYER = "model.layers.1."


@dataclass(frozen=True)
class Error:
    """An error that is planted in a run of two ranks.

    `plant` changes an engine that has been built, and `patches` are in place while the engine is built and trained.
    `words` is a regular expression for the sentences of the comparison. `place` is the entry of the table's last
    column.
    """

    fields: dict[str, Any]
    words: str
    plant: Callable[[Any], None] = lambda engine: None
    patches: Callable[[], AbstractContextManager[Any]] = nullcontext
    place: str = "yes"

    @property
    def layout(self) -> str:
        """The entry of the table's second column."""
        sizes = [f"{name}{size}" for name, size in self.fields.items() if name in ("tp", "cp", "pp", "vp")] or ["dp2"]
        stage = [f"zero{self.fields['zero_stage']}"] if "zero_stage" in self.fields else []
        names = [self.fields[name] for name in ("engine", "model", "precision") if name in self.fields]
        return ", ".join([*(name for name in names if not stage or name != "deepspeed"), *stage, *sizes])


def rank() -> int:
    return dist.get_rank()


def after(engine: Any, method: str, action: Callable[[], Any], only_first: bool = False) -> None:
    """Call `action` after each call of an engine's method, or only after the first one."""
    original = getattr(engine, method)
    calls: list[None] = []

    def extended(*args: Any) -> Any:
        result = original(*args)
        calls.append(None)
        if not only_first or len(calls) == 1:
            action()
        return result

    setattr(engine, method, extended)


def restores(engine: Any, values: Tensor) -> None:
    """Undo what the first step changes in `values`."""
    before = values.detach().clone()
    after(engine, "update", lambda: values.detach().copy_(before), only_first=True)


def parameter(engine: Any, name: str) -> Any:
    return dict(engine._named_parameters())[name]


# tensor parallelism


def _unsummed_norm(engine: Any) -> None:
    parameter(engine, f"{BLOCK}input_layernorm.weight").sequence_parallel = False


def _summed_bias(engine: Any) -> None:
    parameter(engine, f"{BLOCK}self_attention.linear_qkv.bias").sequence_parallel = True


def _unreduced_output(engine: Any) -> None:
    layer = engine.chunks[0].module.decoder.layers[1].mlp.linear_fc2

    def own_part(product: Callable[[slice], Tensor], num_rows: int) -> Callable[[], Tensor]:
        part = product(slice(0, num_rows)).chunk(layer.tp_group.size())[layer.tp_group.rank()].clone()
        return lambda: part

    layer.exchange.reduce_scatter = own_part


def _shifted_lookup(engine: Any) -> None:
    if rank() == 1:
        embedding = engine.chunks[0].module.embedding.word_embeddings
        embedding.vocab_start_index += 1
        embedding.vocab_end_index += 1


@contextmanager
def _shifted_rows() -> Iterator[None]:
    from megabench.engines.megatron import engine

    load = engine.load_weights

    def shifted(chunk: Any, *args: Any) -> None:
        load(chunk, *args)
        weight = chunk.embedding.word_embeddings.weight.data
        if rank() == 1:
            weight.copy_(weight.roll(1, dims=0))

    with patch.object(engine, "load_weights", shifted):
        yield


def _one_head(engine: Any) -> None:
    gradient = parameter(engine, f"{BLOCK}self_attention.linear_qkv.weight").main_grad
    if rank() == 1:
        after(engine, "accumulate", lambda: gradient[:16].mul_(1.05))  # the first query head of this rank


@contextmanager
def _repeated_norms() -> Iterator[None]:
    from megatron.core import tensor_parallel

    with patch.object(tensor_parallel, "param_is_not_tensor_parallel_duplicate", lambda *args, **kwargs: True):
        yield


def _stale_copy(engine: Any) -> None:
    if rank() == 1:
        restores(engine, parameter(engine, f"{BLOCK}input_layernorm.weight"))


# context parallelism


@contextmanager
def _same_positions() -> Iterator[None]:
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    def of_first(angles: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
        chunks = angles.chunk(2 * cp_group.size(), dim=seq_dim)
        return torch.cat([chunks[0], chunks[-1]], dim=seq_dim)

    with patch.object(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", of_first):
        yield


@contextmanager
def _keys_by_rank() -> Iterator[None]:
    from megabench.engines.megatron.blocks import CausalAttention

    with patch.object(CausalAttention, "_in_order", lambda self, ranks: ranks):
        yield


@contextmanager
def _one_layer_not_summed() -> Iterator[None]:
    """The gradients of one layer's matrices on the second rank are not added to those of the first rank."""
    from megabench.engines.megatron import fp8_linear, linear

    def skip(add: Callable[..., Tensor], weight: Any, *args: Any) -> Tensor:
        return linear.added(weight) if rank() == 1 and getattr(weight, "is_skipped", False) else add(weight, *args)

    with (
        patch.object(linear, "_add_weight_gradient", partial(skip, linear._add_weight_gradient)),
        patch.object(fp8_linear, "_add_weight_gradient", partial(skip, fp8_linear._add_weight_gradient)),
    ):
        yield


def _skip_layer(engine: Any) -> None:
    for name, one in engine._named_parameters():
        one.is_skipped = BLOCK in name


# pipeline parallelism


@contextmanager
def _separate_embeddings() -> Iterator[None]:
    from megatron.core.distributed import finalize_model_grads

    module = __import__(finalize_model_grads.__module__, fromlist=["_"])
    with patch.object(module, "_allreduce_word_embedding_grads", lambda *args, **kwargs: None):
        yield


@contextmanager
def _swapped_layers() -> Iterator[None]:
    """The last layer of the first stage and the first layer of the second stage are loaded in each other's place."""
    from megabench.engines.megatron import model

    name_of, others = model.whole_model_name, {"layers.1.": "layers.2.", "layers.2.": "layers.1."}

    def swapped(chunk: Any, name: str) -> str:
        return re.sub(r"layers\.[12]\.", lambda found: others[found[0]], name_of(chunk, name))

    with patch.object(model, "whole_model_name", swapped):
        yield


@contextmanager
def _wrong_order() -> Iterator[None]:
    """The first stage runs its layers in the wrong order."""
    from megabench.engines.megatron.model import ParallelLlama

    init = ParallelLlama.__init__

    def reversed_layers(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if rank() == 0:
            self.layers = self.layers[::-1]

    with patch.object(ParallelLlama, "__init__", reversed_layers):
        yield


@contextmanager
def _repeated_micro_batch() -> Iterator[None]:
    """The first stage reads the first micro-batch again as the second one, and the last stage the right labels."""
    batches = test_tensor_parity.micro_batches

    def repeated(*args: Any) -> Any:
        read = batches(*args)
        return [read[0], read[0], *read[2:]] if rank() == 0 else read

    with patch.object(test_tensor_parity, "micro_batches", repeated):
        yield


def _stale_output_layer(engine: Any) -> None:
    if rank() == 1:
        restores(engine, parameter(engine, "output_layer.weight"))


# data parallelism


@contextmanager
def _same_data() -> Iterator[None]:
    batches = test_tensor_parity.micro_batches
    with patch.object(
        test_tensor_parity, "micro_batches", lambda source, run, dp_rank, step: batches(source, run, 0, step)
    ):
        yield


def _sum_instead_of_mean(engine: Any) -> None:
    for module in engine.model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no reduction with a factor
            module.set_gradient_divide_factor(1.0)


@contextmanager
def _unreduced_tensor() -> Iterator[None]:
    """DDP does not reduce one gradient."""
    from megabench.engines.ddp import engine

    wrap = engine.DistributedDataParallel

    def ignoring(model: Any, **settings: Any) -> Any:
        wrap._set_params_and_buffers_to_ignore_for_model(model, [f"{LAYER}mlp.down_proj.weight"])
        return wrap(model, **settings)

    with patch.object(engine, "DistributedDataParallel", ignoring):
        yield


def _stale_replica(engine: Any) -> None:
    if rank() == 1:
        restores(engine, parameter(engine, f"{LAYER}mlp.down_proj.weight"))


def _stale_shard(engine: Any) -> None:
    if rank() == 1:
        restores(engine, engine.shards[f"{LAYER}mlp.down_proj.weight"])


def _stale_gather(engine: Any) -> None:
    """The second step computes with the old rows of the second rank, whose update is right."""
    shard = engine.shards[f"{LAYER}mlp.down_proj.weight"].detach()
    if rank() == 0:
        return
    old, accumulate = shard.clone(), engine.accumulate
    calls: list[None] = []

    def stale(batches: Any) -> None:
        new = shard.clone()
        calls.append(None)
        if len(calls) == 2:
            shard.copy_(old)
        accumulate(batches)
        shard.copy_(new)

    engine.accumulate = stale


def _stale_partition(engine: Any) -> None:
    """ZeRO-3 does not copy one updated partition from the master weights."""
    if rank() == 1:
        one = dict(engine.model.named_parameters())[f"{LAYER}mlp.down_proj.weight"]
        restores(engine, one.ds_tensor.data)


def _dropped_micro_batch(engine: Any) -> None:
    """The second rank drops the gradient of its first micro-batch. The losses are right."""
    backward = engine._backward
    calls: list[None] = []

    def dropping(loss: Tensor) -> None:
        calls.append(None)
        backward(loss * 0 if rank() == 1 and len(calls) % engine.run.num_micro_batches == 1 else loss)

    engine._backward = dropping


def _unreduced_part(engine: Any) -> None:
    """The second rank's gradient of one tensor is not added."""
    one = dict(engine.model.named_parameters())[f"{LAYER}mlp.up_proj.weight"]
    if rank() == 1:
        one.register_hook(torch.zeros_like)


@contextmanager
def _own_fp8_scales() -> Iterator[None]:
    """Each rank casts its rows under the scale of these rows, and all rows are used with the scale of one rank."""
    from megabench.engines.fsdp import fp8_gather

    with patch.object(fp8_gather, "_reduce_amaxes", lambda amaxes: None):
        yield


@contextmanager
def _own_fp8_amaxes() -> Iterator[None]:
    """Each tp rank casts its part of an activation under the scale of this part, and uses the first rank's scale."""
    from megabench.engines.megatron.exchange import Collectives

    with patch.object(Collectives, "largest", lambda self, value: value):
        yield


# the optimizer


def _group_of_norms(engine: Any) -> dict[str, Any]:
    groups = [group for group in engine.optimizer.param_groups if group["weight_decay"] == 0]
    return groups[0]


def _other_beta2(engine: Any) -> None:
    _group_of_norms(engine)["betas"] = (0.9, 0.98)


def _decayed_norms(engine: Any) -> None:
    _group_of_norms(engine)["weight_decay"] = 0.1


def _other_learning_rate(engine: Any) -> None:
    if rank() == 1:
        for group in engine.optimizer.param_groups:
            group["lr_scale"] *= 1.05


def words_of(name: str, count: int = 1, what: str = "gradients of step 1") -> str:
    """Return a pattern of the sentence about `count` tensors that differ, of which `name` is nearest to the loss."""
    return rf"\b{count} of \d+ {what} differ .*Seen from the loss, the first is {name}"


ALL_GRADIENTS = words_of("", 39)
SECOND_STEP = words_of("", 39, "gradients of step 2")
ZERO = {"engine": "deepspeed"}
FSDP = {"engine": "fsdp"}
ERRORS: dict[str, Error] = {
    "a norm not summed over tp": Error({"tp": 2}, words_of(f"{LAYER}input_layernorm.weight"), _unsummed_norm),
    "biases summed over tp": Error({"tp": 2, **QWEN2}, words_of(rf"{LAYER}self_attn.\w_proj.bias", 3), _summed_bias),
    "one head 5% off on one rank": Error(
        {"tp": 2}, words_of(rf"{LAYER}self_attn.q_proj.weight.* block 1[6-9] of 32 of its rows by 0.05"), _one_head
    ),
    "one rank's embedding rows loaded shifted": Error(
        {"tp": 2}, words_of("model.embed_tokens.weight", what="weights of step 0"), patches=_shifted_rows
    ),
    "one rank's embedding rows looked up shifted": Error({"tp": 2}, ALL_GRADIENTS, _shifted_lookup, place="no"),
    "a reduce-scatter left out": Error({"tp": 2}, ALL_GRADIENTS, _unreduced_output, place="no"),
    "norms counted tp times in the clipping": Error(
        {"tp": 2}, words_of("", 39, "second moments of step 1"), patches=_repeated_norms, place="no"
    ),
    "another beta2 of the norms": Error(
        {"tp": 2}, words_of("model.norm.weight", 9, "second moments of step 1"), _other_beta2
    ),
    "one layer's matrices not summed over cp": Error({"cp": 2}, words_of(LAYER, 7), _skip_layer, _one_layer_not_summed),
    "one layer's matrices not summed over dp": Error({}, words_of(LAYER, 7), _skip_layer, _one_layer_not_summed),
    "rotary positions of the first cp rank": Error({"cp": 2}, ALL_GRADIENTS, patches=_same_positions, place="no"),
    "keys in the order of the cp ranks": Error({"cp": 2}, ALL_GRADIENTS, patches=_keys_by_rank, place="no"),
    "tied embeddings not summed over stages": Error(
        {"pp": 2, **QWEN2}, words_of("model.embed_tokens.weight"), patches=_separate_embeddings
    ),
    "the output layer's tied weights not updated": Error(
        {"pp": 2, **QWEN2}, "copies of the weight of model.embed_tokens.weight differ", _stale_output_layer
    ),
    "layers loaded into each other's stage": Error(
        {"pp": 2}, words_of("model.layers.2.", 14, "weights of step 0"), patches=_swapped_layers
    ),
    "two layers run in the wrong order": Error({"pp": 2}, ALL_GRADIENTS, patches=_wrong_order, place="no"),
    "a stage repeats a micro-batch": Error(
        {"pp": 2, "vp": 2}, ALL_GRADIENTS, patches=_repeated_micro_batch, place="every tensor"
    ),
    "weight decay of the norms": Error(
        {"pp": 2}, words_of("model.norm.weight", 9, "updates of step 1"), _decayed_norms
    ),
    "a gradient not reduced": Error(
        {"engine": "ddp"}, words_of(f"{LAYER}mlp.down_proj.weight"), patches=_unreduced_tensor
    ),
    "a replica not updated": Error(
        {"engine": "ddp"}, f"copies of the weight of {LAYER}mlp.down_proj.weight differ", _stale_replica
    ),
    "two ranks read the same data": Error(FSDP, ALL_GRADIENTS, patches=_same_data, place="every tensor"),
    "gradients summed instead of averaged": Error(
        FSDP, "All gradients of step 1 are 2 times", _sum_instead_of_mean, place="every tensor"
    ),
    "a shard not updated": Error(
        FSDP,
        words_of(
            rf"{LAYER}mlp.down_proj.weight.* block (1[6-9]|[23]\d) of 32 of its rows by 1", what="updates of step 1"
        ),
        _stale_shard,
    ),
    "an old shard gathered in step 2": Error(FSDP, SECOND_STEP, _stale_gather, place="no"),
    "one rank's part of a gradient left out": Error(
        {**ZERO, "zero_stage": 1}, words_of(f"{LAYER}mlp.up_proj.weight"), _unreduced_part
    ),
    "a micro-batch dropped on one rank": Error(
        {**ZERO, "zero_stage": 2}, ALL_GRADIENTS, _dropped_micro_batch, place="every tensor"
    ),
    "a partition not copied from the masters": Error(
        {**ZERO, "zero_stage": 3, "zero_persistence": 100},
        f"the forward pass uses are not those of the optimizer: {LAYER}mlp.down_proj.weight",
        _stale_partition,
    ),
    "a learning rate 5% too high on one rank": Error(
        {"engine": "megatron_fsdp"}, words_of("", 19, "updates of step 1"), _other_learning_rate
    ),
    "fp8 scales of a rank's own rows": Error(
        {**FSDP, "precision": "fp8"}, "gradients of step 1", patches=_own_fp8_scales, place="no"
    ),
    "fp8 scales of a rank's own tokens": Error(
        {"tp": 2, "precision": "fp8"}, "gradients of step 1", patches=_own_fp8_amaxes, place="no"
    ),
    "a norm not updated on one rank": Error(
        {"tp": 2}, f"The copies of the weight of {LAYER}input_layernorm.weight differ between ranks", _stale_copy
    ),
}


def train_with_error(run: ResolvedConfig, path: Path, error: str | None) -> Series:
    if error is None:
        return train(run, path)
    build, one = test_tensor_parity.build_engine, ERRORS[error]

    def build_with_error(*args: Any) -> Any:
        engine = build(*args)
        one.plant(engine)
        return engine

    with one.patches(), patch.object(test_tensor_parity, "build_engine", build_with_error):
        return train(run, path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Sketched:
    return Sketched(tmp_path_factory.mktemp("sketches"), train_with_error)


def compared(trained: Sketched, error: str) -> tuple[bool, TensorParity]:
    """Return whether losses and norms show the error, and the comparison of the sketches. Print the row of the table.

    The reference is a correct run of the same work in one process.
    """
    one = ERRORS[error]
    work = {name: value for name, value in one.fields.items() if name in ("model", "num_layers", "precision")}
    path, series = trained(error, 2, error, **one.fields)
    reference, other = trained(f"reference {work}", engine="ddp", **work)
    found = compare_files(path, reference)
    by_losses = seen_by_losses(series, other, work.get("precision", "fp32"))
    print_row(error, one.layout, by_losses, found, one.place)
    return by_losses, found


@pytest.mark.parametrize("error", ERRORS)
def test_a_planted_error_is_placed(trained: Sketched, error: str) -> None:
    _, found = compared(trained, error)
    assert re.search(ERRORS[error].words, "\n".join(found.problems)), found


@pytest.mark.parametrize("fields", [{"engine": "fsdp"}, {"tp": 2}], ids=str)
def test_rounding_in_fp8_is_no_error(trained: Sketched, fields: dict[str, Any]) -> None:
    fields = {**fields, "precision": "fp8"}
    found = compare_files(trained(str(fields), 2, **fields)[0], trained("fp8", engine="ddp", precision="fp8")[0])
    print(f"{fields}: {found.part_of_tolerance:.2g} times the tolerance of {found.largest}")
    assert found.problems == []
