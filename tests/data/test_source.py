"""Sources: pure functions of data, seed and index; every window once an epoch; one sentence for each mistake."""

import hashlib
import json
import sys

import numpy as np
import pytest
import torch

from megabench.data import DataError, source, text
from megabench.data.source import open_source, window_order
from tests.data.conftest import DOCUMENTS, open_corpus


def test_synthetic_is_a_pure_function_of_seed_and_index(resolve):
    one, same = open_source(resolve(data="synthetic")), open_source(resolve(data="synthetic"))
    other_seed = open_source(resolve(data="synthetic", seed=5))
    same.sequence(3)
    assert torch.equal(one.sequence(7), same.sequence(7))
    assert not torch.equal(one.sequence(7), one.sequence(8))
    assert not torch.equal(one.sequence(7), other_seed.sequence(7))
    assert one.sha256 == same.sha256 != other_seed.sha256
    assert one.name == "synthetic"
    drawn = torch.cat([one.sequence(index) for index in range(400)])
    assert drawn.min() == 0 and drawn.max() == 511


def test_stdlib_is_python_text_with_documents_closed(resolve):
    corpus = open_corpus(resolve(data="stdlib"))
    assert corpus.name == "stdlib"
    assert corpus.num_tokens > 5_000_000
    assert corpus.tokens.dtype == np.uint16
    num_documents = int((corpus.tokens == 256).sum())
    assert num_documents == len(list(text.read_stdlib()))
    assert corpus.tokens[-1] == 256
    assert corpus.sha256 == hashlib.sha256(corpus.tokens.tobytes()).hexdigest()
    assert bytes(corpus.tokens[:9].astype(np.uint8)) == next(text.read_stdlib()).text[:9]


def test_stdlib_leaves_out_installed_packages_and_tests():
    places = [piece.where for piece in text.read_stdlib()]
    assert any(place.endswith("json/decoder.py") for place in places)
    assert not any("site-packages" in place or "/test/" in place for place in places)
    assert places == sorted(places)


def test_each_epoch_reads_every_window_once_in_another_order(tmp_path, resolve):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(256)) * 2)  # 513 tokens with the end of the document: 32 windows of 17
    corpus = open_corpus(resolve(data=str(path)))
    assert corpus.num_windows == 32
    epochs = [[tuple(corpus.sequence(epoch * 32 + i).tolist()) for i in range(32)] for epoch in range(3)]
    stream = [*range(256), *range(256), 256]
    windows = sorted(tuple(stream[start : start + 17]) for start in range(0, 512, 16))
    assert all(sorted(epoch) == windows for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert torch.equal(corpus.sequence(5), torch.tensor(epochs[0][5]))  # going back changes nothing


def test_the_order_is_fixed_by_seed_and_epoch():
    assert np.array_equal(window_order(7, 1, 50), window_order(7, 1, 50))
    window_order.cache_clear()
    again = window_order(7, 1, 50)
    assert sorted(again) == list(range(50))
    assert not np.array_equal(again, window_order(7, 2, 50))
    assert not np.array_equal(again, window_order(8, 1, 50))


def test_a_text_file_keeps_any_bytes(tmp_path, resolve):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 \x00" * 10)
    assert open_corpus(resolve(data=str(path))).tokens.tolist() == [*(b"caf\xe9 \x00" * 10), 256]


def test_a_long_text_file_is_read_in_pieces_of_one_document(tmp_path, resolve, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_text("some line\n" * 100)
    monkeypatch.setattr(text, "PIECE_BYTES", 64)
    pieces = list(text.read_text(path))
    assert len(pieces) > 10
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert b"".join(piece.text for piece in pieces) == path.read_bytes()
    assert sum(piece.input_bytes for piece in pieces) == path.stat().st_size


def expected_bytes():
    return [token for document in DOCUMENTS for token in [*document.encode(), 256]]


def test_jsonl_documents_end_with_the_end_of_document_token(jsonl, resolve):
    assert open_corpus(resolve(data=str(jsonl))).tokens.tolist() == expected_bytes()


def test_parquet_reads_as_jsonl_does(tmp_path, jsonl, resolve):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "documents.parquet"
    parquet.write_table(pyarrow.table({"id": range(len(DOCUMENTS)), "text": DOCUMENTS}), path, row_group_size=2)
    corpus = open_corpus(resolve(data=str(path)))
    assert corpus.tokens.tolist() == expected_bytes()
    assert corpus.sha256 == open_source(resolve(data=str(jsonl))).sha256


def test_hugging_face_tokenizer(jsonl, tokenizer_dir, resolve):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    corpus = open_corpus(resolve(data=str(jsonl), tokenizer=str(tokenizer_dir)))
    expected = [token for document in DOCUMENTS for token in [*tokenizer.encode(document), tokenizer.eos_token_id]]
    assert corpus.tokens.tolist() == expected
    assert tokenizer.decode(corpus.tokens.tolist()) == "<eos>".join([*DOCUMENTS, ""])
    assert corpus.sha256 != open_source(resolve(data=str(jsonl))).sha256


@pytest.mark.parametrize("config", ["tokenizer_config.json", "config.json"])
def test_a_tokenizer_with_its_own_code_is_refused(tmp_path, resolve, jsonl, monkeypatch, config):
    """transformers asks on standard input whether to run it; here every answer would be yes."""
    monkeypatch.setattr("builtins.input", lambda *arguments: "y")
    ran = tmp_path / "ran"
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    (directory / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass T: pass\nclass C: pass\n")
    auto_map = {"AutoTokenizer": ["own.T", None], "AutoConfig": "own.C"}
    (directory / config).write_text(json.dumps({"auto_map": auto_map, "model_type": "own"}))
    words = r"needs its own Python code \(auto_map in tokenizer_config.json\), which megabench does not"
    if config == "config.json":  # a tokenizer is not made by the model's code
        words = r"contains no tokenizer that transformers can load"
    with pytest.raises(DataError, match=words):
        open_source(resolve(data=str(jsonl), tokenizer=str(directory)))
    assert not ran.exists()


def write(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("absent.txt", None, r"absent.txt does not exist\. Give"),
        ("absent", None, r"data=.*absent does not exist\. Use stdlib, synthetic, a .txt"),
        ("empty.jsonl", b"", r"empty.jsonl is empty\. Give a file that contains text\."),
        ("table.csv", b"a,b\n", r"data=.*table.csv has an unsupported file type\. Use stdlib"),
        (
            "short.txt",
            b"0123456789",
            r"has 11 tokens, too few for one sequence of 16 .* set seq_length to 10 or less\.",
        ),
        (
            "blank.jsonl",
            b"\n\n",
            r"has 0 tokens, too few for one sequence of 16 inputs and one more label\. Use more text\.$",
        ),
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', r"bad.jsonl line 2 is not valid JSON: Expecting value"),
        ("list.jsonl", b"[1, 2]\n", r"list.jsonl line 1 has no text\. Add a field named text"),
        ("lacks.jsonl", b'\n{"body": "a"}\n', r"lacks.jsonl line 2 has no text"),
        ("number.jsonl", b'{"text": 5}\n', r"number.jsonl line 1 has no text\. .* contains a string"),
        ("half.jsonl", b'{"text": "\\ud800"}\n', r"half.jsonl line 1 contains text that is not valid Unicode"),
        ("latin.jsonl", b'{"text": "caf\xe9"}\n', r"latin.jsonl line 1 is not valid JSON"),
        ("no.parquet", b"PAR1 but no more", r"no.parquet is not a readable Parquet file"),
    ],
)
def test_text_that_cannot_be_used(tmp_path, resolve, name, content, sentence):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(DataError, match=sentence) as caught:
        open_source(resolve(data=str(tmp_path / name)))
    assert "\n" not in str(caught.value)


def test_a_directory_is_no_data(tmp_path, resolve):
    with pytest.raises(DataError, match="is a directory"):
        open_source(resolve(data=str(tmp_path)))
    (tmp_path / "d.txt").mkdir()
    with pytest.raises(DataError, match=r"d\.txt is a directory\. Give a \.txt"):
        open_source(resolve(data=str(tmp_path / "d.txt")))


def test_text_too_large_for_every_rank_points_to_preprocess(tmp_path, resolve, monkeypatch):
    monkeypatch.setattr(source, "MAX_TEXT_BYTES", 100)
    with pytest.raises(DataError, match=r"too much to tokenize on every rank\. .* megabench preprocess"):
        open_source(resolve(data=str(write(tmp_path / "big.txt", b"x" * 101))))


def test_tokens_outside_the_models_vocabulary(tmp_path, resolve, jsonl, monkeypatch):
    from megabench.data.tokenizer import ByteTokenizer

    monkeypatch.setattr(ByteTokenizer, "end_of_document", 600)
    words = r"contains token 600, but llama-tiny has a vocabulary of 512 tokens \(0 to 511\)"
    with pytest.raises(DataError, match=words):
        open_source(resolve(data=str(jsonl)))


def test_parquet_without_a_text_column_or_with_an_empty_cell(tmp_path, resolve):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "body.parquet")
    with pytest.raises(DataError, match=r"has no text column\. Rename one of: body\."):
        open_source(resolve(data=str(tmp_path / "body.parquet")))
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "null.parquet")
    with pytest.raises(DataError, match=r"null.parquet row 2 has no text"):
        open_source(resolve(data=str(tmp_path / "null.parquet")))


def test_parquet_without_pyarrow(tmp_path, resolve, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"requires pyarrow\. Run `pip install pyarrow`"):
        open_source(resolve(data=str(write(tmp_path / "a.parquet", b"PAR1"))))


def test_tokenizer_directories_that_are_none(tmp_path, jsonl, resolve):
    with pytest.raises(
        DataError,
        match=r"tokenizer=.*absent is not a directory\. Use tokenizer=bytes, or the directory of a Hugging Face",
    ):
        open_source(resolve(data=str(jsonl), tokenizer=str(tmp_path / "absent")))
    with pytest.raises(DataError, match="contains no tokenizer that transformers can load"):
        open_source(resolve(data=str(jsonl), tokenizer=str(tmp_path)))


def test_a_hugging_face_tokenizer_needs_utf8(tmp_path, tokenizer_dir, resolve):
    path = write(tmp_path / "latin.txt", b"caf\xe9 " * 20)
    with pytest.raises(DataError, match=r"latin.txt is not UTF-8 .* use tokenizer=bytes"):
        open_source(resolve(data=str(path), tokenizer=str(tokenizer_dir)))


def test_blank_lines_of_jsonl_are_no_documents(tmp_path):
    path = write(tmp_path / "a.jsonl", b"\n" + json.dumps({"text": "a"}).encode() + b"\n\n")
    assert [piece.text for piece in text.read_text(path)] == [b"a"]
