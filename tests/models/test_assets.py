"""The files of a model directory that checkpoints and exports keep."""

import os
from pathlib import Path

import pytest

from megabench.models import assets
from megabench.models.assets import is_tokenizer, is_weights, read_assets

KEPT = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "spiece.model",
    "sentencepiece.bpe.model", "tokenizer.model.v3", "tekken.json", "qwen.tiktoken", "vocab.txt",
    "prophetnet.tokenizer", "preprocessor_config.json", "processor_config.json", "README.md", "README.pt.md", "LICENSE",
    "USE POLICY (v2).txt", "使用说明.md", "modeling_own.py", "chat_template.jinja",
    "additional_chat_templates/tool.jinja", "1_Pooling/config.json", "original/params.json", "a/b/c/d.txt",
}  # fmt: skip
LEFT_OUT = {
    "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "model.ckpt.index",
    "model.ckpt.data-00000-of-00001", "rust_model.ot", "model.Q4_K_M.gguf", "MODEL.GGUF", "onnx/model.onnx",
    "onnx/model.onnx_data", "original/consolidated.00.pth", "optimizer.pt", "training_args.bin", "adapter_config.json",
    ".gitattributes", ".git/config", ".cache/huggingface/token", "__pycache__/modeling_own.cpython-311.pyc",
    "runs/Nov26/events.out.tfevents.1", "events.out.tfevents.1", "wandb/run/files/config.yaml", "model.lock",
}  # fmt: skip
NAMED = {"checkpoint-500/config.json", "checkpoint-500/tokenizer.json", "checkpoint-500/model.safetensors"}


def write(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def read(folder: Path) -> tuple[set[str], list[str]]:
    """The paths of the copied files, and the notes."""
    notes: list[str] = []
    return set(read_assets(folder, notes.append)), notes


def test_all_files_but_weights(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", *KEPT, *LEFT_OUT)
    notes: list[str] = []
    found = read_assets(folder, notes.append)
    assert found == {name: name.encode() for name in KEPT} and notes == []
    assert [name for name in LEFT_OUT if is_weights(name) and name in found] == []
    write(folder, *NAMED)
    assert read(folder) == (KEPT, [f"not copied from {folder}: 'checkpoint-500' (another model)"])
    assert set(read_assets(folder, notes.append, is_tokenizer)) == {
        "tokenizer.json", "tokenizer_config.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model.v3",
        "tekken.json", "qwen.tiktoken", "vocab.txt", "prophetnet.tokenizer", "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
    }  # fmt: skip


def test_limits_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "model", "config.json", "tokenizer.json", "A.md", "B.md", "a/b/c/d/e.txt", "a;b.txt")
    with (folder / "dump.txt").open("wb") as file:
        file.truncate(assets.LARGEST_FILE + 1)
    files, notes = read(folder)
    assert files == {"config.json", "tokenizer.json", "A.md", "B.md"}
    assert len(notes) == 1 and "'dump.txt' (64 MiB; the limit is 64 MiB for one file)" in notes[0]
    assert "'a;b.txt' (its path" in notes[0] and "'a/b/c/d/e.txt' (its path" in notes[0]
    (folder / "dump.txt").unlink()
    monkeypatch.setattr(assets, "LARGEST_TOTAL", 27)
    files, notes = read(folder)
    assert files == {"config.json", "tokenizer.json"} and "'A.md' (the limit is 0 MiB for all files)" in notes[0]
    monkeypatch.setattr(assets, "LARGEST_TOTAL", 1000)
    monkeypatch.setattr(assets, "MOST_FILES", 3)
    files, notes = read(folder)
    assert files == {"config.json", "tokenizer.json", "A.md"} and "'B.md' and all files after it" in notes[0]


def test_links_to_other_files_are_not_followed(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "config.json", "LICENSE", ".git/config")
    private = write(tmp_path / "home", "passwd", "tokenizer.json", "README.md", "templates/tool.jinja")
    (folder / "vocab.txt").symlink_to(private / "passwd")
    (folder / "tokenizer.json").symlink_to(private / "tokenizer.json")
    (folder / "README.md").symlink_to(private / "README.md")
    (folder / "additional_chat_templates").symlink_to(private / "templates")
    (folder / "COPYING").symlink_to("LICENSE")
    (folder / "git.txt").symlink_to(".git/config")
    (folder / "gone.txt").symlink_to(private / "gone")
    os.mkfifo(folder / "pipe.txt")
    files, notes = read(folder)
    assert files == {"config.json", "LICENSE", "COPYING", "tokenizer.json"}
    for name in ("vocab.txt", "README.md", "additional_chat_templates", "git.txt", "gone.txt", "pipe.txt"):
        assert f"'{name}' (" in notes[0], name
    assert f"'vocab.txt' (a link to {private / 'passwd'}; replace the link with the file)" in notes[0]


def test_the_cache_of_the_hub(tmp_path: Path) -> None:
    """Files of a snapshot are links to blobs of the repository, which may be links to blobs of the whole cache."""
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--name" / "snapshots" / "0a1b"
    write(cache, "models--org--name/blobs/11", "blobs/aa/22", "models--org--other/blobs/33")
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/11")
    (snapshot / "additional_chat_templates" / "tool.jinja").symlink_to("../../../blobs/11")
    (cache / "models--org--name" / "blobs" / "22").symlink_to("../../blobs/aa/22")
    (snapshot / "README.md").symlink_to("../../blobs/22")
    (snapshot / "other.md").symlink_to("../../../models--org--other/blobs/33")
    (tmp_path / "model").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "model"):
        files, notes = read(folder)
        assert files == {"config.json", "README.md", "additional_chat_templates/tool.jinja"}
        assert len(notes) == 1 and "'other.md' (a link to" in notes[0]
