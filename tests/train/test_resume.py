"""Which checkpoint a run goes on from, and which it refuses, naming both sides."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from transformers import GraniteConfig

from megabench.checkpoint import CheckpointError
from megabench.checkpoint.directory import claim_run_id, folder_of
from megabench.checkpoint.files import write_files
from megabench.checkpoint.manifest import DataEntry, Manifest, ModelEntry, OptimizerEntry, TrainingEntry
from megabench.checkpoint.save import tensors_of
from megabench.checkpoint.shards import StateShard, blocks_of, whole
from megabench.config import ConfigError, ResolvedConfig, RunConfig
from megabench.data.source import open_source
from megabench.runtime.rendezvous import Rendezvous, launch_identity
from megabench.train.resume import Resume, find_resume
from tests.checkpoint.test_weights_only import save_weights

BASE: dict[str, Any] = {"model": "llama-tiny", "data": "synthetic", "device": "cpu"}


def resolve(**fields: Any) -> ResolvedConfig:
    return RunConfig.parse(BASE | fields).resolve(1, "cpu")


def write(directory: Path, step: int, **fields: Any) -> Path:
    """A checkpoint of a run with `fields`, with hardly any tensors."""
    run = resolve(**fields)
    source = open_source(run)
    folder = folder_of(directory, step)
    folder.mkdir(parents=True)
    shards = [StateShard("weight", blocks_of(whole("model.norm.weight", (4,)), 0, 4), torch.ones(4))]
    training = TrainingEntry(
        run_id="a" * 12,
        step=step,
        engine=run.engine,
        layout={},
        world_size=1,
        optimizer=OptimizerEntry(name="adamw", step=step),
        data=DataEntry(
            name=source.name, sha256=source.sha256, next_sequence=step * run.global_batch, tokenizer=source.tokenizer
        ),
        config=run.flat(mode="json"),
    )
    files = tuple(write_files(folder, "rank-0", tensors_of(shards)))
    model = ModelEntry.of(run.shape)
    Manifest(model=model, training=training, num_elements={}, versions={}, files=files).write(folder)
    return folder


def find(**fields: Any) -> Resume:
    run = resolve(**fields)
    return find_resume(run, open_source(run), Rendezvous(HashStore(), 0, 1, 0, 1))


def test_it_goes_on_behind_the_newest(tmp_path: Path) -> None:
    write(tmp_path, 3)
    newest = write(tmp_path, 6)
    resume = find(load=tmp_path, tp=1, micro_batch=2)
    assert resume.found and resume.found.folder == newest and resume.num_done == 6 and resume.notes == []


def test_it_goes_on_behind_one_that_is_named(tmp_path: Path) -> None:
    older = write(tmp_path, 3)
    write(tmp_path, 6)
    resume = find(load=older)
    assert resume.found and resume.found.folder == older and resume.num_done == 3
    next(older.glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(CheckpointError, match="step-00000003 is damaged"):
        find(load=older)
    with pytest.raises(CheckpointError, match="already contains checkpoints, the newest of step 6"):
        find(load=older, save=tmp_path)


def test_what_changes_is_said(tmp_path: Path) -> None:
    write(tmp_path, 6)
    (note,) = find(load=tmp_path, steps=200, lr=1e-3).notes
    assert "steps 100 -> 200" in note and "lr 0.003 -> 0.001" in note and "betas" not in note


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_layers": 4}, ["contains llama-tiny", "num_layers 8 there, 4 here"]),
        ({"model": "llama3-8b", "num_layers": 1}, ["contains llama-tiny", "trains llama3-8b", "hidden_size 128 there"]),
        ({"engine": "deepspeed"}, ["saved by the megatron engine", "engine is deepspeed", "megabench convert"]),
        ({"optimizer": "sgd"}, ["optimizer=adamw", "optimizer=sgd"]),
        ({"seed": 7}, ["seed=1234", "seed=7"]),
        ({"seq_length": 64}, ["seq_length=256", "seq_length=64"]),
        ({"global_batch": 32}, ["global_batch=16", "global_batch=32"]),
        ({"data": "stdlib"}, ["data synthetic", "reads stdlib"]),
    ],
)
def test_another_run_is_refused(tmp_path: Path, fields: dict[str, Any], words: list[str]) -> None:
    folder = write(tmp_path, 6)
    with pytest.raises(CheckpointError) as error:
        find(load=tmp_path, **fields)
    assert str(folder) in str(error.value) and all(word in str(error.value) for word in words), error.value


def test_another_configuration_of_the_same_sizes_is_refused(tmp_path: Path) -> None:
    """Only config.json has the multipliers of a model that only transformers computes."""
    fields = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GraniteConfig(**fields, intermediate_size=64, logits_scaling=8.0)
    config.save_pretrained(tmp_path / "model")
    run = {"engine": "ddp", "model": str(tmp_path / "model"), "seq_length": 16}
    folder = write(tmp_path / "run", 6, **run)
    config.save_pretrained(folder / "hugging_face")
    config.use_cache, config.eos_token_id, config.architectures = False, 3, ["Other"]
    config.save_pretrained(tmp_path / "same")
    assert find(load=tmp_path / "run", **run | {"model": str(tmp_path / "same")}).num_done == 6
    config.logits_scaling = 2.0
    config.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"logits_scaling 8\.0 there, 2\.0 here\); train the same model"):
        find(load=tmp_path / "run", **run | {"model": str(tmp_path / "other")})


def test_another_tokenizer_is_refused_by_name(tmp_path: Path, tokenizer_dir: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text " * 1000)
    fields = {"data": str(text), "seq_length": 32}
    write(tmp_path / "run", 3, **fields)
    find(load=tmp_path / "run", **fields)
    words = rf"with tokenizer bytes \(257 tokens, sha256 .*with tokenizer {tokenizer_dir} \(400 tokens, sha256 .* same"
    with pytest.raises(CheckpointError, match=words):
        find(load=tmp_path / "run", tokenizer=str(tokenizer_dir), **fields)


def test_weights_alone_are_no_run(tmp_path: Path) -> None:
    save_weights(folder_of(tmp_path, 0), {"model.norm.weight": torch.ones(4)})
    with pytest.raises(CheckpointError, match="contains only weights"):
        find(load=tmp_path)


def test_a_directory_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        find(load=tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        find(load=tmp_path / "nowhere", save=tmp_path)
    resume = find(load=tmp_path / "new", save=tmp_path / "new")
    assert resume.found is None and "training starts at step 0" in resume.notes[0]


def test_a_directory_of_another_run_is_not_saved_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 6)
    with pytest.raises(CheckpointError, match=r"already contains checkpoints, the newest of step 6; add --load"):
        find(save=tmp_path)
    assert find(save=tmp_path, load=tmp_path).num_done == 6
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(CheckpointError, match="already contains checkpoints"):
        find(save=tmp_path)  # a restart alone does not make them its own
    claim_run_id(tmp_path, launch_identity(), continues=False)
    resume = find(save=tmp_path)
    assert resume.num_done == 6 and resume.continues, "started again, it goes on from its own"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another launch")
    with pytest.raises(CheckpointError, match="already contains checkpoints"):
        find(save=tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"save_every": 5}, "save_every=5 needs a directory"),
        ({"keep": 2}, "keep=2 needs a directory"),
        (
            {"save": "x", "engine": "deepspeed", "zero_stage": 0, "precision": "bf16", "grad_dtype": "bf16"},
            "use zero_stage=1",
        ),
    ],
)
def test_settings_that_make_no_sense(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(**fields)
