"""A run that cannot fit is refused before its model is built."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from megabench.config import ResolvedConfig, RunConfig
from megabench.config.auto import resolve_first
from megabench.models.catalog import CATALOG, get_model
from megabench.train import memory_check
from megabench.train.flags import parse_flags
from megabench.train.memory_check import MemoryCheckError, check_memory, state_bytes
from tests.models.tiny import save_model


def resolve(world_size: int = 1, **fields: Any) -> ResolvedConfig:
    return RunConfig(model="llama3-8b", device="cpu", **fields).resolve(world_size, "cpu")


def check(world_size: int, local_world_size: int, **fields: Any) -> None:
    given = RunConfig.parse({"model": "llama3-8b", "device": "cpu", **fields})
    check_memory(given.resolve(world_size, "cpu"), given, 0, local_world_size)


PARAMETERS = get_model("llama3-8b").num_parameters


@pytest.mark.parametrize(
    ("world_size", "fields", "bytes_per_parameter"),
    [
        (1, {}, 16),  # fp32 weights, gradients and two moments
        (1, {"optimizer": "sgd"}, 8),
        (2, {"tp": 2}, 8),
        (4, {"tp": 2, "engine": "megatron"}, 4 + 2),  # the optimizer is sharded over two replicas
        (4, {"engine": "deepspeed"}, 4),
        (4, {"engine": "fsdp"}, 4),
        (4, {"engine": "ddp"}, 16),
    ],
)
def test_the_state_of_a_rank(world_size: int, fields: dict[str, Any], bytes_per_parameter: float) -> None:
    state, on_host = state_bytes(resolve(world_size, **fields), world_size)
    gathered = 0.35 if fields.get("engine") in ("deepspeed", "fsdp") else 0.02  # a few whole layers
    assert state / PARAMETERS == pytest.approx(bytes_per_parameter, rel=gathered) and on_host == 0


def test_it_is_refused_with_the_figures_and_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "available_host_bytes", lambda: 23 * 10**9)
    with pytest.raises(MemoryCheckError, match=r"llama3-8b needs about 128 GB on this host, which has 23 GB; use .*"):
        check(1, 1)
    check(4, 2, engine="deepspeed", num_layers=1, optimizer="sgd")
    with pytest.raises(MemoryCheckError, match="needs about 128 GB"):
        check(2, 2, tp=2)  # both ranks are on this host
    check(16, 1, tp=8, pp=2)


def test_offloaded_state_counts_for_the_host() -> None:
    run = RunConfig.parse({"model": "llama3-8b", "engine": "deepspeed", "offload": "all"}).resolve(8, "cuda")
    state, on_host = state_bytes(run, 8)
    assert state < 2 * PARAMETERS and on_host / PARAMETERS == pytest.approx(2 + 4 + 12)


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 23 GB and GPUs with 80 GB."""
    monkeypatch.setattr(memory_check, "available_host_bytes", lambda: 23 * 10**9)
    gpu = SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda rank: SimpleNamespace(total_memory=80e9)))
    monkeypatch.setattr(memory_check, "torch", gpu)


def refusal(world_size: int, device: Literal["cpu", "cuda"], flags: list[str]) -> str:
    given = parse_flags([*flags, "--device", device])
    assert given
    with pytest.raises(MemoryCheckError) as error:
        check_memory(resolve_first(given, world_size, device), given, 0, world_size)
    return str(error.value)


def advised_commands(flags: list[str], world_size: int, sentence: str) -> list[tuple[int, list[str]]]:
    """The numbers of ranks and the flags of all ways out that a sentence names, apart from --skip-memory-check."""
    advice = sentence.partition("; use ")[2].removesuffix("--skip-memory-check").removesuffix("or ")
    found = []
    for way in filter(None, re.split(r", (?![^(]*\))", advice)):
        if ranks := re.match(r"(?:more hosts \()?(\d+) (?:GPUs|processes\))(?: with (.*))?", way):
            found.append((int(ranks[1]), [*flags, *shlex.split(ranks[2] or "")]))
        elif models := re.match(r"a --model that fits( without --num-layers)? \((.*)\)", way):
            kept = flags.copy()
            if models[1]:
                at = kept.index("--num-layers")
                del kept[at : at + 2]
            found += [(world_size, [*kept, "--model", name]) for name in models[2].split(", ")]
        else:
            found.append((world_size, [*flags, *shlex.split(way)]))
    return found


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize(
    ("world_size", "device", "flags"),
    [
        (1, "cpu", ["--model", "llama3-405b"]),
        (4, "cpu", ["--model", "llama3-8b", "--engine", "ddp"]),
        (8, "cuda", ["--model", "llama3-70b"]),
        (8, "cuda", ["--model", "llama3-70b", "--micro-batch", "auto", "--global-batch", "8"]),
        (8, "cuda", ["--model", "llama3-70b", "--engine", "fsdp", "--num-layers", "78"]),
        (8, "cuda", ["--model", "llama3-8b", "--engine", "ddp", "--powersgd-rank", "4"]),
        (8, "cuda", ["--model", "llama3-70b", "--engine", "deepspeed", "--zero-stage", "1"]),
        (8, "cuda", ["--model", "llama3-70b", "--engine", "ddp", "--optimizer", "adafactor"]),
        (8, "cuda", ["--model", "bloom-7b1", "--engine", "ddp"]),
        (8, "cuda", ["--model", "llama3-70b", "--tp", "2", "--pp", "2", "--vp", "2"]),
        (8, "cuda", ["--model", "llama3-70b", "--load", "checkpoints"]),
        (8, "cuda", ["--model", "llama3-70b", "--precision", "fp8", "--num-layers-at-start-in-bf16", "30"]),
        (8, "cuda", ["--model", "llama3-70b", "--data", "tokens", "--tokenizer", "tokenizer"]),
    ],
)
def test_every_advised_command_is_accepted_and_fits(
    world_size: int, device: Literal["cpu", "cuda"], flags: list[str]
) -> None:
    sentence = refusal(world_size, device, flags)
    advised = advised_commands(flags, world_size, sentence)
    assert advised, sentence
    for ranks, words in advised:
        given = parse_flags([*words, "--device", device])
        assert given
        check_memory(resolve_first(given, ranks, device), given, 0, world_size)
    if "--load" in flags:
        assert "--model" not in sentence and "--num-layers" not in sentence, "the checkpoint is of this model"
    if "--tokenizer" in flags:
        assert "--model" not in sentence or "llama-" not in sentence, "no smaller vocabulary has all tokens"


def test_a_directory_that_does_not_fit_gets_advice_that_applies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, CATALOG["llama-tiny"])
    state, _ = state_bytes(RunConfig.parse({"model": str(tmp_path), "device": "cpu"}).resolve(1, "cpu"), 1)
    monkeypatch.setattr(memory_check, "available_host_bytes", lambda: int(0.6 * state))
    flags = ["--model", str(tmp_path)]
    sentence = refusal(1, "cpu", flags)
    assert re.search(r"; use more hosts \(\d processes\) with --[^,]*, or --skip-memory-check$", sentence), sentence
    for ranks, words in advised_commands(flags, 1, sentence):
        given = parse_flags([*words, "--device", "cpu"])
        assert given
        check_memory(given.resolve(ranks, "cpu"), given, 0, 1)
