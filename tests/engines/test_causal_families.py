"""Every causal model of transformers is trained exactly as transformers trains it, or is refused in a sentence.

`make test-exhaustive` runs all models under all engines and writes a table of the outcomes to build/causal-families.md.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.causal_parity import Model, Outcome
from tests.models.causal_families import (
    MODELS,
    PARALLEL,
    REFUSALS,
    REFUSED_LATE,
    UNBUILT,
    TinyModel,
    save_model,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"world_size": 1, "engine": "ddp"},
    "ddp dp=2": {"world_size": 2, "engine": "ddp"},
    "fsdp dp=2": {"world_size": 2, "engine": "fsdp"},
    "megatron_fsdp dp=2": {"world_size": 2, "engine": "megatron_fsdp"},
    "zero1 dp=2": {"world_size": 2, "engine": "deepspeed", "zero_stage": 1},
    "zero2 dp=2": {"world_size": 2, "engine": "deepspeed", "zero_stage": 2},
    "zero3 dp=2": {"world_size": 2, "engine": "deepspeed", "zero_stage": 3},
    "megatron tp=2": {"world_size": 2, "engine": "megatron", "tp": 2},
    "megatron pp=2": {"world_size": 2, "engine": "megatron", "pp": 2},
    "megatron tp=2 pp=2": {"world_size": 4, "engine": "megatron", "tp": 2, "pp": 2},
}
ALL = [(name, layout) for name in MODELS for layout in LAYOUTS]
# The models that CI trains, with whole and with sharded weights, by the feature of the architecture for which they were
# chosen. `make test-exhaustive` trains all models under all engines.
_MODELS_IN_CI = {
    "tied and untied output layers": "llama llama-tied gemma",
    "biases, also of the output layer": "qwen2 phi gptj",
    "transposed weights and learned positions": "gpt2 opt",
    "ALiBi": "bloom mpt",
    "fused, latent and differential attention": "falcon minicpm3 diffllama",
    "a mixture of experts": "mixtral deepseek_v3",
    "state spaces, recurrence and linear attention": "mamba mamba2 rwkv xlstm recurrent_gemma",
    "hybrids, also with shared blocks": "bamba falcon_h1 lfm2 nemotron_h-dense qwen3_5_text zamba2",
    "decoders, also of encoder-decoder models": "bart biogpt xglm",
    "local and sliding attention": "gpt_neo mistral gemma3_text modernbert-decoder",
    "embeddings per layer, and buffers that persist": "gemma3n_text gemma4_text apertus",
    "an output layer that is registered before the backbone or inside of a head": "camembert-decoder rembert-decoder",
    "a padding token in the vocabulary": "llama-padding",
    "models with several modalities": "gemma3",
}
MODELS_IN_CI = [name for names in _MODELS_IN_CI.values() for name in names.split()]
# Models whose last registered module does not compute the logits, on which the hooks of Megatron-FSDP depend.
LAST_MODULE_IS_NOT_LAST = ("camembert-decoder", "rembert-decoder")
IN_CI = [(name, layout) for name in MODELS_IN_CI for layout in ("ddp dp=2", "zero3 dp=2")]
IN_CI += [(name, "megatron_fsdp dp=2") for name in LAST_MODULE_IS_NOT_LAST]
IN_CI += [(name, "ddp") for name in REFUSALS]
TABLE = Path("build/causal-families.md")
OUTCOMES: dict[tuple[str, str], Outcome] = {}  # by model and layout


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Model]:
    """Return the name of a model, and the model in a directory."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, MODELS[request.param])
    return request.param, Model(folder)


@pytest.mark.distributed
@pytest.mark.parametrize(("saved", "layout"), IN_CI, indirect=["saved"])
def test_it_is_equal_or_refused(saved: tuple[str, Model], layout: str) -> None:
    check(*saved, layout)


@pytest.mark.distributed
@pytest.mark.exhaustive
@pytest.mark.parametrize(("saved", "layout"), [pair for pair in ALL if pair not in IN_CI], indirect=["saved"])
def test_it_is_equal_or_refused_under_every_engine(saved: tuple[str, Model], layout: str) -> None:
    check(*saved, layout)


def check(name: str, model: Model, layout: str) -> None:
    outcome = OUTCOMES[name, layout] = model.outcome(**LAYOUTS[layout])
    refusal = REFUSALS.get(name)
    if LAYOUTS[layout]["engine"] == "megatron" and name not in PARALLEL:
        refusal = "no tensor-parallel blocks" if refusal is None or name in REFUSED_LATE else refusal
    if refusal:
        assert outcome.kind == "REFUSED" and re.search(refusal, outcome.detail), outcome
    else:
        assert outcome.kind == "EQUAL", f"{outcome.kind}: {outcome.detail}"


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Write the outcomes as a table."""
    yield
    if OUTCOMES:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(table_of(OUTCOMES))


def table_of(outcomes: dict[tuple[str, str], Outcome]) -> str:
    counts: Counter[tuple[str, str]] = Counter((layout, outcome.kind) for (_, layout), outcome in outcomes.items())
    kinds = ("EQUAL", "REFUSED", "DIFFERENT", "CRASH")
    lines = [f"| Layout | {' | '.join(kinds)} |", "| --- " * 5 + "|"]
    lines += [f"| {layout} | {' | '.join(str(counts[layout, kind]) for kind in kinds)} |" for layout in LAYOUTS]
    lines += ["", "| Model | Layout | Outcome | Detail |", "| --- | --- | --- | --- |"]
    for (name, layout), (kind, detail) in outcomes.items():
        lines.append(f"| {name} | {layout} | {kind} | {detail.strip().splitlines()[-1][:300]} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("model_type", UNBUILT)
def test_the_list_of_types_that_cannot_be_built_is_exact(tmp_path: Path, model_type: str) -> None:
    with pytest.raises(Exception, match=UNBUILT[model_type][1]):
        save_model(tmp_path, TinyModel(model_type, {}))


def test_the_tables_name_known_models() -> None:
    assert REFUSALS.keys() | {*PARALLEL, *LAST_MODULE_IS_NOT_LAST} <= MODELS.keys()
    assert MODELS.keys() >= {*MODELS_IN_CI}
    assert REFUSALS.keys() >= REFUSED_LATE
