"""Token files: what megabench preprocess writes, megatron-core and this package read alike; damage is told."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megabench.cli.preprocess import write_tokens
from megabench.data import DataError, token_file
from megabench.data.checks import check_before_start
from megabench.data.source import open_source
from megabench.data.text import read_text
from megabench.data.token_file import (
    id_range,
    merged,
    open_token_file,
    read_facts,
    scan,
    token_file_prefix,
    write_facts,
)
from megabench.data.tokenizer import BYTES, ByteTokenizer
from tests.data.conftest import DOCUMENTS, open_corpus

PREPROCESS = Path(__file__).parents[2] / "tools" / "preprocess.py"


def run_preprocess(*words, check=True):
    return subprocess.run(
        [sys.executable, PREPROCESS, *map(str, words)], capture_output=True, text=True, check=check, timeout=240
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with documents.jsonl and the token file `tokens` made of it, and what the command printed."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return folder, run_preprocess(folder / "documents.jsonl", "--out", folder / "out" / "tokens").stdout


@pytest.fixture
def prefix(made, tmp_path):
    """A copy of the token file that a test may damage."""
    shutil.copytree(made[0] / "out", tmp_path / "out")
    return tmp_path / "out" / "tokens"


def test_preprocess_tells_what_it_wrote_and_leaves_nothing_else(made):
    folder, printed = made
    num_tokens = sum(len(document.encode()) + 1 for document in DOCUMENTS)
    assert f"4 documents, {num_tokens:,} tokens, {2 * num_tokens:,} bytes in " in printed
    assert f"tokenizer bytes (257 tokens, sha256 {ByteTokenizer.used.sha256[:12]})" in printed
    facts = json.loads((folder / "out" / "tokens.json").read_text())
    assert facts["tokenizer"] == ByteTokenizer.used.model_dump()
    assert sorted(os.listdir(folder / "out")) == ["tokens.bin", "tokens.idx", "tokens.json"]


def test_reads_as_the_text_itself_does(made, resolve):
    folder, _ = made
    direct = open_corpus(resolve(data=str(folder / "documents.jsonl")))
    for name in ("tokens", "tokens.bin", "tokens.idx"):
        corpus = open_corpus(resolve(data=str(folder / "out" / name)))
        assert (corpus.name, corpus.sha256, corpus.num_tokens) == ("tokens", direct.sha256, direct.num_tokens)
        assert all((corpus.sequence(i) == direct.sequence(i)).all() for i in range(2 * direct.num_windows))


def test_tokens_are_mapped_not_loaded(prefix, resolve):
    corpus = open_corpus(resolve(data=str(prefix)))
    assert isinstance(corpus.tokens, np.memmap)
    assert not corpus.tokens.flags.writeable


def test_megatron_core_reads_the_same(prefix):
    from megabench.runtime import megatron_cpu

    megatron_cpu.install()
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    theirs, ours = IndexedDataset(str(prefix)), open_token_file(prefix)
    assert len(theirs) == len(DOCUMENTS)
    assert np.array_equal(np.concatenate([theirs[i] for i in range(len(theirs))]), ours)
    assert theirs.document_indices.tolist() == list(range(len(DOCUMENTS) + 1))


def test_hugging_face_tokenizer_over_several_files_and_workers(tmp_path, jsonl, tokenizer_dir, resolve):
    text = tmp_path / "more.txt"
    text.write_text("def more():\n    return 1\n" * 50)
    options = ("--tokenizer", tokenizer_dir, "--workers", 2)
    run_preprocess(jsonl, text, *options, "--out", tmp_path / "tokens")
    direct = [open_corpus(resolve(data=str(path), tokenizer=str(tokenizer_dir))).tokens for path in (jsonl, text)]
    assert np.array_equal(open_token_file(tmp_path / "tokens"), np.concatenate(direct))


def test_no_append_eod(tmp_path, jsonl):
    write_tokens([jsonl], tmp_path / "tokens", BYTES, workers=1, append_eod=False)
    assert bytes(open_token_file(tmp_path / "tokens").astype(np.uint8)) == "".join(DOCUMENTS).encode()


def test_bad_input_leaves_the_older_token_file_alone(prefix, tmp_path):
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    done = run_preprocess(tmp_path / "bad.jsonl", "--out", prefix, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("bad.jsonl line 2 has no text. Add a field named text that contains a string.")
    assert "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before


@pytest.mark.parametrize("suffix", [".bin", ".json", ".idx"])
def test_a_directory_in_place_of_an_output_leaves_the_other_files_alone(prefix, jsonl, suffix):
    prefix.with_suffix(suffix).unlink()
    prefix.with_suffix(suffix).mkdir()
    before = sorted(prefix.parent.iterdir())
    with pytest.raises(DataError, match=rf"cannot write .*tokens\{suffix}, which is a directory; remove it"):
        write_tokens([jsonl], prefix, BYTES, workers=1, append_eod=True)
    assert sorted(prefix.parent.iterdir()) == before


def test_a_missing_half(prefix, resolve):
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(DataError, match=r"tokens.idx exists, but .*tokens.bin does not\. Create both files"):
        open_source(resolve(data=str(prefix)))
    prefix.with_suffix(".idx").rename(prefix.with_suffix(".bin"))
    with pytest.raises(DataError, match=r"tokens.bin exists, but .*tokens.idx does not"):
        open_source(resolve(data=str(prefix) + ".bin"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: b"",
        lambda index: index[:20],
        lambda index: index[:-4],
        lambda index: index + b"\0" * 8,
        lambda index: b"NOTMAGIC" + index[8:],
        lambda index: index[:9] + b"\2" + index[10:],  # version
        lambda index: index[:17] + b"\7" + index[18:],  # dtype code: float
        lambda index: index[:34] + b"\xff" * 4 + index[38:],  # a negative length
    ],
)
def test_a_damaged_index(prefix, damage):
    path = prefix.with_suffix(".idx")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"tokens.idx is damaged or is not a token index"):
        open_token_file(prefix)


def test_a_truncated_token_file(prefix):
    path = prefix.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"tokens.bin has \d+ bytes, but tokens.idx requires \d+"):
        open_token_file(prefix)


def test_tokens_of_another_vocabulary(prefix, resolve):
    tokens = np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16)
    tokens[5] = 40_000
    tokens.tofile(prefix.with_suffix(".bin"))
    with pytest.raises(DataError, match="contains token 40000, but llama-tiny has a vocabulary of 512 tokens"):
        open_source(resolve(data=str(prefix)))


def test_facts_beside_the_tokens_spare_reading_them(prefix, monkeypatch):
    tokens = open_token_file(prefix)
    expected = scan(tokens)
    monkeypatch.setattr(token_file, "scan", lambda tokens: pytest.fail("read every token"))
    facts = read_facts(prefix, tokens, 256)
    assert facts.tokenizer == ByteTokenizer.used
    assert facts.model_copy(update={"tokenizer": None}) == expected


@pytest.mark.parametrize("content", [None, "", "{}", '{"num_tokens": 3, "max_token": 1, "sha256": "0"}'])
def test_facts_that_are_missing_or_do_not_fit_are_found_again(prefix, content):
    path = prefix.with_suffix(".json")
    path.unlink() if content is None else path.write_text(content)
    tokens = open_token_file(prefix)
    assert read_facts(prefix, tokens, 256) == scan(tokens)


def test_facts_older_than_the_tokens_are_not_believed(prefix):
    facts = prefix.with_suffix(".json")
    expected = scan(open_token_file(prefix)).sha256
    facts.write_text(facts.read_text().replace(expected, "0" * 64))
    tokens = open_token_file(prefix)
    assert read_facts(prefix, tokens, 256).sha256 == "0" * 64
    os.utime(facts, ns=(0, 0))
    assert read_facts(prefix, tokens, 256).sha256 == expected


def test_facts_of_replaced_tokens_are_not_believed(prefix, tmp_path):
    """A copy may keep the time of its source, which is older than the facts."""
    tokens = np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16)
    np.roll(tokens, 1).tofile(tmp_path / "other.bin")
    os.utime(tmp_path / "other.bin", ns=(0, 0))
    shutil.copy2(tmp_path / "other.bin", prefix.with_suffix(".bin"))
    replaced = open_token_file(prefix)
    facts = read_facts(prefix, replaced, 256)
    assert facts == scan(replaced) and facts.sha256 != scan(tokens).sha256


def test_facts_with_another_largest_token_are_not_believed(prefix, resolve):
    facts = prefix.with_suffix(".json")
    facts.write_text(facts.read_text().replace('"max_token": 256', '"max_token": 7'))
    tokens = open_token_file(prefix)
    assert open_source(resolve(data=str(prefix))).sha256 == scan(tokens).sha256
    changed = np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16)
    changed[9] = 511
    changed.tofile(prefix.with_suffix(".bin"))
    os.utime(facts)  # newer than the changed tokens, as after a copy
    source = open_source(resolve(data=str(prefix)))
    assert source.sha256 == scan(changed).sha256 and source.tokenizer is None


def write_token_file(prefix, tokens, code):
    """Write `tokens` as a token file of one document, without megatron-core's restriction of the dtypes."""
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, 1, 2)
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    prefix.with_suffix(".idx").write_bytes(header + struct.pack("<iqqq", len(tokens), 0, 0, 1))
    return prefix


@pytest.mark.parametrize(
    ("code", "dtype", "token"),
    [(2, np.int8, -1), (3, np.int16, -100), (4, np.int32, -100), (5, np.int64, 2**40), (8, np.uint16, 512)],
)
@pytest.mark.parametrize("claimed", [None, 256])
def test_tokens_outside_the_vocabulary_are_refused_in_every_dtype(tmp_path, resolve, code, dtype, token, claimed):
    tokens = np.full(5000, 7, dtype=dtype)
    tokens[[4321, 4444]] = token
    prefix = write_token_file(tmp_path / "tokens", tokens, code)
    if claimed:
        write_facts(prefix, scan(tokens).model_copy(update={"max_token": claimed}))
    words = rf"contains token {token}, but llama-tiny has a vocabulary of 512 tokens \(0 to 511\).* number 4,321 of"
    for check in (open_source, check_before_start):
        with pytest.raises(DataError, match=words):
            check(resolve(data=str(prefix)))


def test_small_dtypes_that_fit_are_accepted(tmp_path, resolve):
    prefix = write_token_file(tmp_path / "tokens", np.arange(100, dtype=np.int8), 2)
    assert open_source(resolve(data=str(prefix))).sequence(0).max() < 128
    check_before_start(resolve(data=str(prefix)))


def test_shares_of_the_check_cover_every_token(monkeypatch):
    tokens = np.full(1000, 5, dtype=np.int32)
    for place in (0, 1, 333, 334, 999):
        changed = tokens.copy()
        changed[place] = -3
        for num_shares in (1, 3, 7):
            shares = [id_range(changed, 512, share, num_shares) for share in range(num_shares)]
            assert merged(shares) == (5, place)
            assert sum(share.first_outside is not None for share in shares) == 1
    monkeypatch.setattr(token_file, "_SCAN_TOKENS", 64)
    assert merged(id_range(changed, 512, share, 3) for share in range(3)) == (5, 999)
    assert merged(id_range(tokens[:2], 512, share, 3) for share in range(3)) == (5, None)  # fewer tokens than shares


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (-8, 5),  # the last document ends beyond the last sequence
        (-16, 9),  # documents in the wrong order
        (-8 * 5, 1),  # the first document does not start at the first sequence
        (-8 * 6, 2**40),  # the last sequence starts beyond the end of the .bin file
        (-8 * 8, 4),  # the second sequence does not follow the first one
    ],
)
def test_an_index_that_points_elsewhere(prefix, place, value):
    path = prefix.with_suffix(".idx")
    content = bytearray(path.read_bytes())
    content[place : place + 8 or None] = struct.pack("<q", value)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokens.idx is damaged or is not a token index"):
        open_token_file(prefix)


def test_the_index_is_read_in_blocks(prefix, monkeypatch):
    monkeypatch.setattr(token_file, "_SCAN_TOKENS", 3)
    assert len(open_token_file(prefix)) == sum(len(document.encode()) + 1 for document in DOCUMENTS)


def test_a_dtype_that_does_not_fit_the_size(prefix):
    path = prefix.with_suffix(".idx")
    content = path.read_bytes()
    path.write_bytes(content[:17] + b"\4" + content[18:])  # int32 in place of uint16
    with pytest.raises(DataError, match=r"damaged|requires \d+"):
        open_token_file(prefix)


def test_scan_of_a_file_longer_than_its_blocks(monkeypatch):
    tokens = np.arange(1000, dtype=np.int32)
    whole = scan(tokens)
    monkeypatch.setattr(token_file, "_SCAN_TOKENS", 64)
    assert scan(tokens) == whole


def test_prefix_of_a_token_file(prefix, tmp_path):
    assert token_file_prefix(prefix) == token_file_prefix(prefix.with_suffix(".bin")) == prefix
    dotted = tmp_path / "v1.5"
    for suffix in (".bin", ".idx"):
        shutil.copy(prefix.with_suffix(suffix), tmp_path / f"v1.5{suffix}")
    assert token_file_prefix(dotted) == token_file_prefix(tmp_path / "v1.5.idx") == dotted
    assert token_file_prefix(tmp_path / "absent") is None


def test_text_files_are_not_taken_for_token_files(jsonl):
    assert token_file_prefix(jsonl) is None
    assert len(list(read_text(jsonl))) == len(DOCUMENTS)
