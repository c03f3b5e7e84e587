"""Files of others are regular files of a limited size, depth and precision, or refused at once in one sentence."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megabench import inputs
from megabench.checkpoint.directory import RUN_ID_NAME, is_launched_by
from megabench.checkpoint.files import check_files
from megabench.checkpoint.manifest import MANIFEST_NAME, DamagedError, FileEntry, Manifest
from megabench.cost.fabric_files import read_fabric
from megabench.cost.profile import read_profile
from megabench.data.text import read_text as read_pieces
from megabench.data.token_file import recorded_facts
from megabench.data.tokenizer import open_tokenizer, tokenizer_sha256
from megabench.errors import UserError, error_message
from megabench.hardware.topo_files import distance_in_nccl_topology
from megabench.hardware.transport import LogTail
from megabench.models.find import find_model
from megabench.models.hugging_face import own_code
from megabench.models.model_directory import INDEX, HuggingFaceWeights
from megabench.record import RunRecord, read_records
from megabench.runtime.run_lock import check_free
from megabench.settings.reading import read_json_object, read_yaml_mapping
from megabench.study.study import StudyFile
from megabench.train.resume import ROLLBACKS_NAME, read_rollbacks
from megabench.transport_summary import read_files
from tests.checkpoint.test_damage import manifest_of

DEEP = "[" * 200 + "]" * 200
CONTENTS = {
    "very deep": "[" * 200_000,
    "deep": DEEP,
    "deep object": '{"a":' * 200 + "1" + "}" * 200,
    "in a field": f'{{"schema_version": {DEEP}, "weight_map": {DEEP}, "rollbacks": {DEEP}, "pid": {DEEP}}}',
    "5,000 digits": '{"schema_version": ' + "9" * 5000 + "}",
    "400 digits": '{"schema_version": ' + "9" * 400 + "}",
    "no text": "\udcff\udcfe",
}
SPECIAL: dict[str, Callable[[Path], object]] = {
    "a named pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a directory": lambda path: path.mkdir(),
}


def rollbacks(path: Path) -> object:
    training = manifest_of(1, ()).training
    assert training
    return read_rollbacks(path.parent, training)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "settings": ("run.yaml", read_yaml_mapping),
    "DeepSpeed's settings": ("ds.json", read_json_object),
    "study": ("study.yaml", StudyFile.read),
    "profile": ("profile.json", read_profile),
    "fabric": ("fabric.json", read_fabric),
    "model": ("config.json", lambda path: find_model(str(path.parent))),
    "code of a model": ("tokenizer_config.json", lambda path: own_code(path.parent)),
    "index of weights": (INDEX, lambda path: HuggingFaceWeights(path.parent, find_model("llama-tiny"))),
    "weights": ("model.safetensors", lambda path: HuggingFaceWeights(path.parent, find_model("llama-tiny"))),
    "tokenizer": ("tokenizer.json", lambda path: open_tokenizer(str(path.parent))),
    "hash of a tokenizer": ("tokenizer.json", lambda path: tokenizer_sha256(str(path.parent))),
    "jsonl": ("data.jsonl", lambda path: [*read_pieces(path)]),
    "token facts": ("data.json", lambda path: recorded_facts(path.with_suffix(""))),
    "record": ("record.json", RunRecord.read),
    "results": ("results.jsonl", read_records),
    "lock": (".claim.json", lambda path: check_free(path.parent)),
    "rollbacks": (ROLLBACKS_NAME, rollbacks),
    "run id": (RUN_ID_NAME, lambda path: is_launched_by(path.parent, "a")),
    "manifest": (MANIFEST_NAME, lambda path: Manifest.read(path.parent)),
    "tensors": (
        "a.safetensors",
        lambda path: check_files(path.parent, [FileEntry(name=path.name, num_bytes=1, crc32=0)]),
    ),
    "log": ("nccl.log", lambda path: read_files([path])),
    "own log": ("nccl.log", lambda path: LogTail(path).read_on()),
    "topology": ("topology.xml", lambda path: distance_in_nccl_topology(path, "0000:00:00.0")),
}


def sentence_of(reader: str, path: Path) -> str | None:
    try:
        READERS[reader][1](path)
    except (UserError, DamagedError) as error:
        text = str(error)
    except OSError as error:
        text = error_message(error)
    else:
        return None
    assert text and "\n" not in text and "Traceback" not in text
    return text


@pytest.mark.timeout(30)
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("reader", READERS)
def test_only_regular_files_are_opened(tmp_path: Path, reader: str, special: str) -> None:
    path = tmp_path / READERS[reader][0]
    SPECIAL[special](path)
    said = sentence_of(reader, path)
    if said:
        assert any(words in said for words in ("regular file", "irectory", "readable")), said


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("reader", READERS)
def test_deep_and_long_values_give_one_sentence(tmp_path: Path, reader: str, content: str) -> None:
    path = tmp_path / READERS[reader][0]
    path.write_bytes(CONTENTS[content].encode(errors="surrogateescape"))
    sentence_of(reader, path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (CONTENTS["very deep"], "nested more than 100 levels deep"),
        (DEEP, "nested more than 100 levels deep"),
        ("9" * 5000, "an integer has 5,000 digits, and 300 are the limit"),
        ("-" + "9" * 301, "an integer has 301 digits"),
    ],
)
def test_limits_of_json(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        inputs.parse_json(text)


def test_what_is_within_the_limits_is_read(tmp_path: Path) -> None:
    path, content = (
        tmp_path / "a.json",
        ["[" * 99 + "]" * 99, "9" * 300, "-" + "9" * 300, '{"a": [1.5, null, "\\u2028"]}'],
    )
    for text in content:
        path.write_text(text)
        assert inputs.read_json(path) == json.loads(text)
    assert inputs.read_bytes(path, path.stat().st_size) == path.read_bytes()
    with pytest.raises(OSError, match="larger than 5 bytes"):
        inputs.read_bytes(path, 5)


def test_a_pipe_of_the_shell_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"tp: 2\n")
    os.close(writing)
    assert read_yaml_mapping(Path(f"/dev/fd/{reading}")) == {"tp": 2}
    os.close(reading)


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b", "missing"])
def test_paths_that_no_file_has(path: str) -> None:
    with pytest.raises(OSError, match=r"not a valid path|No such file"):
        inputs.open_regular(Path(path))
