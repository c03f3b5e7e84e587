"""Tokenizers: the tokens of tokenizer.json, one separator per document, and the tokenizer of the model by default."""

import json
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from megabench.checkpoint.assets import assets_of_run
from megabench.cli.preprocess import app, write_tokens
from megabench.data import DataError
from megabench.data.checks import check_before_start
from megabench.data.source import open_source
from megabench.data.text import TextPiece, read_stdlib
from megabench.data.token_file import open_token_file, recorded_facts
from megabench.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, tokenizer_sha256
from megabench.models.catalog import CATALOG
from megabench.models.find import ASSETS
from megabench.models.hugging_face import config_text
from tests.data.conftest import open_corpus

TEXT = "def area(r):  # 12345 it's IT'S\n\t\treturn 3.14159265 * r**2   \n\n\nGröße 中文 😀 <|end|>x"
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"


@pytest.fixture(scope="session")
def json_text() -> str:
    """A tokenizer.json with digits in groups of three, truncation, padding, and BOS and EOS around a text."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece.text.decode() for piece in islice(read_stdlib(), 10)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A <|end|>", special_tokens=[("<|start|>", 0), ("<|end|>", 1)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8, pad_token="<|end|>", pad_id=1)
    return tokenizer.to_str()


def write_tokenizer(folder: Path, json_text: str, **config: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json_text)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_model(folder: Path, num_layers: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(config_text(CATALOG["llama-tiny"].with_layers(num_layers)))
    return folder


def encode(directory: Path, text: str = TEXT) -> list[int]:
    return HuggingFaceTokenizer(directory).encode(TextPiece(text.encode(), "here", True, len(text))).tolist()


CLASSES = ["GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer", "CodeGenTokenizer"]


@pytest.mark.parametrize("name", [*CLASSES, "LlamaTokenizerFast", "GemmaTokenizer", "TokenizersBackend"])
def test_the_tokens_are_those_of_tokenizer_json_whatever_the_class_is(tmp_path, json_text, name):
    directory = write_tokenizer(tmp_path / "t", json_text, tokenizer_class=name, eos_token="<|end|>")
    reference = Tokenizer.from_str(json_text)
    reference.no_truncation()
    reference.no_padding()
    assert encode(directory) == reference.encode(TEXT, add_special_tokens=False).ids
    tokenizer = HuggingFaceTokenizer(directory)
    assert tokenizer.end_of_document == 1
    if name in CLASSES:  # transformers replaces the pre-tokenizer of the file
        assert AutoTokenizer.from_pretrained(directory)(TEXT, add_special_tokens=False)["input_ids"] != encode(
            directory
        )
        assert f"as {name}, which splits " in tokenizer.warning and "unlike tokenizer.json" in tokenizer.warning
    if name == "TokenizersBackend":
        assert tokenizer.warning is None


def test_a_difference_reaches_the_log_and_the_preprocess_command(tmp_path, json_text, jsonl, resolve):
    directory = write_tokenizer(tmp_path / "t", json_text, tokenizer_class="GPT2Tokenizer", eos_token="<|end|>")
    (warning,) = open_source(resolve(data=str(jsonl), tokenizer=str(directory))).warnings
    assert "unlike tokenizer.json" in warning
    result = CliRunner().invoke(app, [str(jsonl), "--out", str(tmp_path / "o"), "--tokenizer", str(directory)])
    assert result.exit_code == 0 and f"WARNING: {warning}" in result.stderr


def test_a_document_has_one_separator_and_no_other_special_token(tmp_path, json_text, jsonl):
    """The post-processor of tokenizer.json would add BOS and EOS."""
    directory = write_tokenizer(tmp_path / "t", json_text, eos_token="<|end|>")
    write_tokens([jsonl], tmp_path / "o", str(directory), workers=1, append_eod=True)
    tokens = open_token_file(tmp_path / "o")
    assert (tokens == 1).sum() == 4 and tokens[-1] == 1 and (tokens == 0).sum() == 0


def test_tokenizers_without_tokenizer_json_are_those_of_transformers(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    tokenizer = HuggingFaceTokenizer(tmp_path / "byt5")
    assert encode(tmp_path / "byt5", "hé") == [byte + 3 for byte in "hé".encode()]
    assert (tokenizer.end_of_document, tokenizer.warning) == (1, None)
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nworld\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    assert encode(folder, "hello world") == [5, 6]
    before = tokenizer_sha256(str(folder))
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nworld\nhello\n")
    assert tokenizer_sha256(str(folder)) != before != tokenizer_sha256(str(tmp_path / "byt5"))


def test_ids_with_gaps_keep_their_values(tmp_path, resolve):
    """Fewer tokens than 2^16, one of which has a larger id."""
    vocabulary = {"a": 0, "b": 70_000, "<eos>": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    directory = write_tokenizer(tmp_path / "t", tokenizer.to_str(), eos_token="<eos>")
    (tmp_path / "text.txt").write_text("a b a")
    write_tokens([tmp_path / "text.txt"], tmp_path / "o", str(directory), workers=1, append_eod=True)
    assert open_token_file(tmp_path / "o").tolist() == [0, 70_000, 0, 2]


def test_a_text_outside_the_vocabulary_is_one_sentence(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    directory = write_tokenizer(tmp_path / "t", tokenizer.to_str())
    with pytest.raises(DataError, match=r"here cannot be tokenized with tokenizer=.* Use another tokenizer\."):
        encode(directory, "a b")


@pytest.mark.parametrize("config", [{}, {"eos_token": "</absent>"}])
def test_documents_without_a_separator_are_refused(tmp_path, json_text, jsonl, resolve, config):
    """Without an EOS token, and with one that the vocabulary does not contain."""
    directory = write_tokenizer(tmp_path / "t", json_text, tokenizer_class="TokenizersBackend", **config)
    words = r"t has no eos_token with an id.* --no-append-eod"
    with pytest.raises(DataError, match=words):
        open_source(resolve(data=str(jsonl), tokenizer=str(directory)))
    with pytest.raises(DataError, match=words):
        check_before_start(resolve(data=str(jsonl), tokenizer=str(directory)))
    with pytest.raises(DataError, match=words):
        write_tokens([jsonl], tmp_path / "o", str(directory), workers=1, append_eod=True)
    assert not (tmp_path / "o.bin").exists()
    write_tokens([jsonl], tmp_path / "o", str(directory), workers=1, append_eod=False)
    assert open_source(resolve(data=str(tmp_path / "o"))).tokenizer.name == str(directory)


def test_an_end_of_document_outside_the_vocabulary_of_the_model(tmp_path, json_text, jsonl, resolve):
    content = json.loads(json_text)
    content["added_tokens"].append({**content["added_tokens"][1], "id": 600, "content": "<|late|>"})
    content["model"]["vocab"]["<|late|>"] = 600
    directory = write_tokenizer(tmp_path / "t", json.dumps(content), eos_token="<|late|>")
    with pytest.raises(DataError, match="contains token 600, but llama-tiny has a vocabulary of 512"):
        open_source(resolve(data=str(jsonl), tokenizer=str(directory)))


def test_the_tokenizer_of_the_model_directory_is_the_default(tmp_path, json_text, jsonl, resolve):
    model = write_tokenizer(write_model(tmp_path / "model"), json_text, eos_token="<|end|>")
    expected = open_source(resolve(data=str(jsonl), tokenizer=str(model)))
    source = open_source(resolve(data=str(jsonl), model=str(model)))
    assert source.sha256 == expected.sha256
    assert source.tokenizer == HuggingFaceTokenizer(model).used
    as_bytes = open_source(resolve(data=str(jsonl), model=str(model), tokenizer="bytes"))
    assert as_bytes.tokenizer == ByteTokenizer.used and as_bytes.sha256 != source.sha256
    # in a checkpoint, both lie in a subdirectory
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(model, checkpoint / ASSETS)
    assert open_source(resolve(data=str(jsonl), model=str(checkpoint))).tokenizer.name == str(checkpoint / ASSETS)


def test_the_default_of_preprocess(tmp_path, json_text, jsonl):
    model = write_tokenizer(write_model(tmp_path / "model"), json_text, eos_token="<|end|>")

    def used(*flags: object) -> str:
        result = CliRunner().invoke(app, [str(jsonl), "--out", str(tmp_path / "o"), *map(str, flags)])
        assert result.exit_code == 0, result.stderr
        facts = recorded_facts(tmp_path / "o")
        assert facts and facts.tokenizer and f"tokenizer {facts.tokenizer}" in result.stdout
        return facts.tokenizer.name

    assert used("--model", model) == str(model)
    assert used("--model", model, "--tokenizer", "bytes") == "bytes"
    assert used("--model", "llama-tiny") == used() == "bytes"
    bare = write_model(tmp_path / "bare")
    error = CliRunner().invoke(app, [str(jsonl), "--out", str(tmp_path / "o"), "--model", str(bare)]).exception
    assert isinstance(error, DataError) and "contains no tokenizer. Set tokenizer to a Hugging Face" in str(error)


@pytest.mark.parametrize("data", ["stdlib", None])
def test_text_for_a_model_directory_without_a_tokenizer_is_refused(tmp_path, jsonl, resolve, data):
    model = write_model(tmp_path / "model")
    config = resolve(data=data or str(jsonl), model=str(model))
    for check in (open_source, check_before_start):
        with pytest.raises(DataError, match=r"model=.*model contains no tokenizer\. Set tokenizer to .* or to bytes\."):
            check(config)
    assert open_source(resolve(data="synthetic", model=str(model))).tokenizer is None
    assert open_source(resolve(data=str(jsonl), model=str(model), tokenizer="bytes")).tokenizer == ByteTokenizer.used


def test_bytes_for_a_model_with_a_large_vocabulary_are_named(jsonl, resolve):
    (warning,) = open_source(resolve(data=str(jsonl), model="llama3-8b")).warnings
    assert "uses 257 of the model's 128,256 tokens" in warning
    assert open_source(resolve(data=str(jsonl), model="llama3-8b", tokenizer="bytes")).warnings == ()
    assert open_source(resolve(data=str(jsonl))).warnings == ()


def test_a_token_file_of_another_tokenizer_is_refused(tmp_path, json_text, jsonl, tokenizer_dir, resolve):
    model = write_tokenizer(write_model(tmp_path / "model"), json_text, eos_token="<|end|>")
    write_tokens([jsonl], tmp_path / "o", str(tokenizer_dir), workers=1, append_eod=True)
    ours, theirs = tokenizer_sha256(str(model))[:12], tokenizer_sha256(str(tokenizer_dir))[:12]
    words = (
        rf"o was made with tokenizer {tokenizer_dir} \(400 tokens, sha256 {theirs}\), but the tokenizer of the run is "
        rf"{model} \(sha256 {ours}\)\. Tokenize the text with megabench preprocess --tokenizer"
    )
    for fields in ({"model": str(model)}, {"tokenizer": str(model)}):
        for check in (open_source, check_before_start):
            with pytest.raises(DataError, match=words):
                check(resolve(data=str(tmp_path / "o"), **fields))
    accepted = resolve(data=str(tmp_path / "o"), model=str(model), tokenizer=str(tokenizer_dir))
    assert open_source(accepted).tokenizer.name == str(tokenizer_dir)
    assert open_source(resolve(data=str(tmp_path / "o"))).tokenizer.name == str(tokenizer_dir)  # of the catalogue
    (tmp_path / "o.json").unlink()  # as other programs write token files
    source = open_corpus(resolve(data=str(tmp_path / "o"), model=str(model)))
    assert source.tokenizer is None and np.array_equal(source.tokens, open_token_file(tmp_path / "o"))


def test_copies_of_a_tokenizer_have_one_hash(tmp_path, tokenizer_dir, json_text):
    sha256 = tokenizer_sha256(str(tokenizer_dir))
    PreTrainedTokenizerFast.from_pretrained(tokenizer_dir).save_pretrained(tmp_path / "saved")
    content = json.loads((tokenizer_dir / "tokenizer.json").read_text())
    content["truncation"] = {"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]  # as older versions
    del content["model"]["ignore_merges"]
    write_tokenizer(tmp_path / "older", json.dumps(content, indent=4), eos_token="<eos>")
    write_tokenizer(tmp_path / "other-eos", json.dumps(content), eos_token="a")
    assert tokenizer_sha256(str(tmp_path / "other-eos")) != sha256
    assert tokenizer_sha256(str(tmp_path / "saved")) == tokenizer_sha256(str(tmp_path / "older")) == sha256
    content["model"]["vocab"]["<eos>"], content["model"]["vocab"]["a"] = 66, 0
    write_tokenizer(tmp_path / "older", json.dumps(content))
    assert tokenizer_sha256(str(tmp_path / "older")) != sha256


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": null}'])
def test_a_damaged_tokenizer_json(tmp_path, jsonl, resolve, content):
    model = write_tokenizer(write_model(tmp_path / "model"), content)
    with pytest.raises(DataError, match=r"tokenizer=.*model (cannot be read|contains no tokenizer)"):
        open_source(resolve(data=str(jsonl), model=str(model)))
    with pytest.raises(DataError, match=r"tokenizer=.*model cannot be read"):
        tokenizer_sha256(str(model))


def test_a_checkpoint_contains_the_files_of_one_tokenizer(tmp_path, json_text, tokenizer_dir, resolve):
    model = write_tokenizer(write_model(tmp_path / "model"), json_text, eos_token="<|end|>")
    (model / "tokenizer.model").write_bytes(b"sentencepiece")
    assert {"tokenizer.json", "tokenizer.model"} < assets_of_run(resolve(model=str(model)), print).keys()
    assets = assets_of_run(resolve(model=str(model), tokenizer=str(tokenizer_dir)), print)
    assert assets["tokenizer.json"] == (tokenizer_dir / "tokenizer.json").read_bytes()
    assert "tokenizer.model" not in assets and "config.json" in assets
    assert assets_of_run(resolve(model=str(model), tokenizer="bytes"), print).keys() == {"config.json"}
