"""Drawn inputs are valid, or refused in one sentence: no other exception, no hang.

The environment variable MEGABENCH_FUZZ multiplies the number of examples.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megabench.checkpoint.manifest import DamagedError, Manifest
from megabench.config import FIELDS, RunConfig, choices_of
from megabench.cost.profile import profile_for
from megabench.errors import UserError
from megabench.hardware.nccl_job import merge, topology_of
from megabench.hardware.transport import read
from megabench.models.catalog import get_model
from megabench.models.hugging_face import config_text
from megabench.record import read_records
from megabench.runtime.process import host_name
from megabench.specs.registry import ENGINES
from megabench.study.study import StudyFile, plan_study
from megabench.train.callbacks.callback import Callback
from megabench.train.callbacks.user_callbacks import load_callbacks
from megabench.train.flags import parse_flags
from tests.checkpoint.test_damage import RUN_ID, forge, write
from tests.hardware.log_lines import INITS, split_job_log
from tests.study.records import make_record
from tests.test_inputs import READERS, SPECIAL, sentence_of

fuzz = settings(
    max_examples=200 * int(os.environ.get("MEGABENCH_FUZZ", "1")),
    deadline=20_000,
    derandomize="MEGABENCH_FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

NUMBERS = st.one_of(
    st.integers(-2, 64),
    st.sampled_from([0, -1, 2**31, 2**63, 10**20, 10**400, 1e300, -1e300, 1e20, float("inf"), float("nan")]),
    st.floats(),
)
TEXTS = st.one_of(
    st.sampled_from(
        ["", "auto", "none", "bf16", "fp16", "fp32", "llama-tiny", "/", "/dev/zero", ".", "x" * 5000, "\0"]
    ),
    st.sampled_from(["\u2028", "\x85", "{", "[", "&a", "*a", "010", "1e20", "0x10", "yes", "~", "-1", "⌘", "\ud7ff"]),
    st.text(max_size=20),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)


def plausible(name: str) -> st.SearchStrategy[Any]:
    """Values of a setting that are often right, so that the checks behind the first are reached."""
    choices = choices_of(name)
    return st.one_of(st.sampled_from(choices) if choices else st.integers(1, 8), st.integers(1, 8), VALUES)


SETTINGS = st.fixed_dictionaries({}, optional={name: plausible(name) for name in FIELDS if name not in ("save", "out")})


def refused_in_one_sentence(attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except (UserError, DamagedError) as error:
        text = str(error)
        assert text and "\n" not in text.strip() and "Traceback" not in text, text


@fuzz
@given(given_settings=SETTINGS, world_size=st.integers(1, 16), device=st.sampled_from(["cpu", "cuda"]))
def test_settings(given_settings: dict[str, Any], world_size: int, device: Any) -> None:
    refused_in_one_sentence(lambda: RunConfig.parse(given_settings).resolve(world_size, device))


@fuzz
@given(
    words=st.lists(st.one_of(st.sampled_from([f"--{name.replace('_', '-')}" for name in FIELDS]), TEXTS), max_size=8)
)
def test_command_lines(words: list[str]) -> None:
    refused_in_one_sentence(lambda: parse_flags([word for word in words if word not in ("--help", "--config")]))


STUDIES = st.one_of(
    TEXTS,
    st.fixed_dictionaries(
        {"trials": st.lists(st.one_of(SETTINGS, VALUES), max_size=3)},
        optional={
            "base": st.one_of(SETTINGS, VALUES),
            **{name: VALUES for name in StudyFile.model_fields if name != "trials"},
        },
    ).map(lambda content: yaml.safe_dump(content, allow_unicode=True)),
    VALUES.map(lambda content: yaml.safe_dump(content, allow_unicode=True)),
)


@fuzz
@given(text=STUDIES)
def test_studies(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "study.yaml")
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        refused_in_one_sentence(lambda: plan_study(StudyFile.read(path), path, 4, "cpu"))


ZERO = st.dictionaries(
    st.sampled_from(["stage", "reduce_bucket_size", "offload_optimizer", "offload_param", "zero_hpz_partition_size"]),
    VALUES,
)
DEEPSPEED = st.one_of(
    VALUES.map(json.dumps),
    TEXTS,
    st.fixed_dictionaries(
        {},
        optional={
            "zero_optimization": st.one_of(ZERO, VALUES),
            "bf16": st.one_of(st.fixed_dictionaries({"enabled": VALUES}), VALUES),
            "train_batch_size": VALUES,
            "gradient_clipping": VALUES,
            "gradient_accumulation_steps": VALUES,
            "communication_data_type": VALUES,
        },
    ).map(json.dumps),
)


@fuzz
@given(text=DEEPSPEED)
def test_deepspeed_files(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ds.json")
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        run = RunConfig.parse({"engine": "deepspeed", "model": "llama-tiny", "deepspeed_config": path})
        refused_in_one_sentence(lambda: run.resolve(2, "cpu"))


def mutated(content: Any, data: st.DataObject) -> Any:
    """The same JSON with one value, at any depth, replaced by a drawn one."""
    if isinstance(content, dict) and content and data.draw(st.integers(0, 9)):
        key = data.draw(st.sampled_from(sorted(content)))
        return content | {key: mutated(content[key], data)}
    if isinstance(content, list) and content and data.draw(st.integers(0, 9)):
        place = data.draw(st.integers(0, len(content) - 1))
        return [*content[:place], mutated(content[place], data), *content[place + 1 :]]
    return data.draw(VALUES)


@fuzz
@given(data=st.data())
def test_records(data: st.DataObject) -> None:
    content = json.loads(make_record([3.0, 2.0]).model_dump_json())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.jsonl")
        path.write_text(json.dumps(mutated(content, data)) + data.draw(TEXTS), encoding="utf-8", errors="surrogatepass")
        refused_in_one_sentence(lambda: read_records(path))


@fuzz
@given(data=st.data())
def test_manifests(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = write(Path(directory), 6)

        def change(body: dict[str, Any]) -> None:
            changed = mutated(dict(body), data)
            body.clear()
            body.update(changed if isinstance(changed, dict) else {"other": changed})

        forge(change)(folder)
        refused_in_one_sentence(lambda: Manifest.read(folder))


def nested(levels: int) -> Any:
    content: Any = {}
    for level in range(levels):
        content = [content] if level % 2 else {"a": content}
    return content


HOSTILE = st.one_of(VALUES, st.sampled_from([99, 101, 400]).map(nested), st.sampled_from([10**299, 10**301, -(10**20)]))


def with_hostile_value(content: Any, data: st.DataObject) -> Any:
    """The same JSON with one value replaced, or with a field that does not belong there."""
    if isinstance(content, dict) and content and (choice := data.draw(st.integers(0, 9))):
        key = data.draw(st.sampled_from(sorted(content)) if choice < 9 else TEXTS)
        return content | {key: with_hostile_value(content.get(key), data)}
    if isinstance(content, list) and content and data.draw(st.integers(0, 9)):
        place = data.draw(st.integers(0, len(content) - 1))
        return [*content[:place], with_hostile_value(content[place], data), *content[place + 1 :]]
    return data.draw(HOSTILE)


SEEDS: dict[str, Any] = {
    "profile": json.loads(profile_for("NVIDIA H100 80GB HBM3").model_dump_json()),
    "model": json.loads(config_text(get_model("llama-tiny"))),
    "code of a model": {"auto_map": {"AutoTokenizer": "code.py"}, "eos_token": {"content": "</s>"}},
    "index of weights": {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}},
    "tokenizer": {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []},
    "jsonl": {"text": "a"},
    "token facts": {"num_tokens": 4, "max_token": 3, "sha256": "", "sample_sha256": "", "tokenizer": None},
    "record": json.loads(make_record([3.0, 2.0]).model_dump_json()),
    "lock": {"token": "a", "host": host_name(), "pid": os.getpid(), "began": 1.5, "since": "now"},
    "rollbacks": {
        "run_id": RUN_ID,
        "rollbacks": [{"step": 9, "restored_step": 6, "next_batch": 9, "problem": "a"}],
    },
    "manifest": {"crc32": 0, "manifest": {"schema_version": 2, "files": []}},
    "study": {"base": {"model": "llama-tiny"}, "trials": [{"engine": "ddp"}]},
}
SEEDS |= {
    "fabric": SEEDS["profile"],
    "results": SEEDS["record"],
    "hash of a tokenizer": SEEDS["tokenizer"],
    "settings": SEEDS["study"]["base"],
}


@fuzz
@given(reader=st.sampled_from(sorted(READERS)), data=st.data())
def test_files_of_every_kind(reader: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, READERS[reader][0])
        if special := data.draw(st.sampled_from([*SPECIAL, *[None] * 30])):
            SPECIAL[special](path)
        else:
            text = json.dumps(with_hostile_value(SEEDS.get(reader), data)).encode(errors="replace")
            start, length = data.draw(st.tuples(st.integers(0, len(text)), st.sampled_from([0, 0, 0, 1, 9])))
            path.write_bytes(text[:start] + data.draw(st.binary(max_size=length)) + text[start:])
        sentence_of(reader, path)


ARGUMENTS = st.one_of(TEXTS, st.lists(st.tuples(TEXTS, VALUES.map(json.dumps))).map(str), st.text("(),=:'\"[]{}&*ab 1"))


@fuzz
@given(arguments=ARGUMENTS, body=st.sampled_from(["1 / 0", "exit(0)", "assert False", "class A: pass", "("]))
def test_callbacks(arguments: str, body: str) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        Path(directory, "drawn_callbacks.py").write_text(body)
        patch.syspath_prepend(directory)
        patch.delitem(sys.modules, "drawn_callbacks", raising=False)
        refused_in_one_sentence(lambda: load_callbacks(f"drawn_callbacks:A({arguments})", []))
        refused_in_one_sentence(lambda: load_callbacks(f"{Callback.__module__}:Callback({arguments})", []))
        sys.modules.pop("drawn_callbacks", None)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_drawn_settings_are_often_right(engine: str) -> None:
    """Otherwise only the first check would ever be reached."""
    assert RunConfig.parse({"engine": engine, "model": "llama-tiny"}).resolve(2, "cpu").engine == engine


def said_of(text: str) -> set[tuple[int, tuple[int, int], str, str]]:
    """What the log says of the communicators. A cut line may miss the suffix /GDRDMA or /read."""
    job = merge([read(text)])
    topology_of(job, p2p_is_nvlink=True)
    return {
        (made.num_ranks, pair, made.where(pair), name.removesuffix("/GDRDMA"))
        for made in job.communicators
        for pair, names in made.transports.items()
        for name in names
    }


@fuzz
@given(
    version=st.sampled_from(sorted(INITS)),
    cuts=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 250)), max_size=4),
    mixed=st.none() | st.integers(0, 200),
)
def test_damaged_lines_of_a_log_change_nothing_that_is_said_of_others(
    version: str, cuts: list[tuple[int, int]], mixed: int | None
) -> None:
    """Lines are cut, or one line runs into the line that another process writes next."""
    of_ranks = split_job_log(version).splitlines()
    num_lines = len(of_ranks) // 8
    lines = [of_ranks[rank * num_lines + line] for line in range(num_lines) for rank in range(8)]
    before = said_of("\n".join(lines) + "\n")
    assert before == said_of("\n".join(of_ranks) + "\n")
    if mixed is None:
        for number, position in cuts:
            lines[number % len(lines)] = lines[number % len(lines)][:position]
    else:
        number = mixed % (len(lines) - 1)
        lines[number : number + 2] = [lines[number] + lines[number + 1]]
    assert said_of("\n".join(lines) + "\n") <= before
