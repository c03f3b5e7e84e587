"""tools/convert.py as a user types it, and the way from a Hugging Face model to a fine-tuned one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.tiny import CATALOG, save_model

pytestmark = pytest.mark.e2e


def run(*words: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a Python command."""
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout, done.stderr


def convert(*words: object) -> tuple[int, str, str]:
    return run("tools/convert.py", *words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    """A model with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "qwen2"
    save_model(folder, CATALOG["qwen2-tiny"].with_layers(2))
    for file in tokenizer_dir.iterdir():
        shutil.copy(file, folder)
    return folder


def test_fine_tuning(tmp_path: Path, folder: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    status, out, err = run(
        *torchrun, "launch/pretrain.py", "--model", folder, "--tokenizer", folder, "--data", text(tmp_path),
        "--tp", 2, "--steps", 3, "--warmup-steps", 1, "--seq-length", 32, "--global-batch", 2, "--device", "cpu",
        "--save", tmp_path / "run",
    )  # fmt: skip
    assert status == 0, out + err
    status, out, err = convert("export", "--ckpt", tmp_path / "run", "--out", tmp_path / "tuned")
    assert status == 0 and "equal: over 256 tokens" in out, out + err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tuned")
    given = tokenizer("def wrap(text):", return_tensors="pt")
    made = model.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert made.shape[1] == given["input_ids"].shape[1] + 8 and tokenizer.decode(made[0]).startswith("def wrap")
    before = AutoModelForCausalLM.from_pretrained(folder)
    moved = [(one - other).abs().max() for one, other in zip(model.parameters(), before.parameters(), strict=True)]
    assert min(moved) > 0 and max(moved) < 1e-2
    status, out, err = convert("inspect", tmp_path / "run")
    assert status == 0 and "a run of the megatron engine, tp2" in out and "tokenizer.json" in out, out + err


def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("To be fine-tuned on, again and again.\n" * 200)
    return path


def test_import_starts_its_processes(tmp_path: Path, folder: Path) -> None:
    status, out, err = convert("import", "--hf", folder, "--out", tmp_path / "checkpoint", "--tp", 2, "--pp", 2)
    assert status == 0, out + err
    assert "GB/s), bitwise equal to the source" in out and "equal: over 256 tokens" in out and "peak memory" in out
    status, out, err = convert("import", "--hf", folder, "--out", tmp_path / "checkpoint")
    refusal = f"Error: {tmp_path / 'checkpoint'} already exists. Give the path of a new directory.\n"
    assert status == 2 and err == refusal
    status, out, err = convert("inspect", tmp_path / "checkpoint")
    assert status == 0 and "an import (weights only)" in out

    other = tmp_path / "other"
    save_model(other, CATALOG["qwen2-tiny"].with_layers(2), seed=1)
    status, out, err = convert("verify", "--hf", other, "--ckpt", tmp_path / "checkpoint")
    assert status == 1 and "NOT EQUAL: over" in out and "computes other logits than transformers" in err, out + err
    save_model(tmp_path / "deeper", CATALOG["qwen2-tiny"].with_layers(3))
    status, out, err = convert("verify", "--hf", tmp_path / "deeper", "--ckpt", tmp_path / "checkpoint")
    assert status == 2 and "num_layers 2 there, 3 here" in err


def test_a_model_without_parallel_blocks(tmp_path: Path) -> None:
    flags = ("--engine", "deepspeed", "--zero-stage", 2, "--precision", "bf16", "--seq-length", 32, "--device", "cpu")
    status, out, err = run(
        *("launch/pretrain.py", "--model", "gpt2-tiny", "--num-layers", 2, *flags, "--global-batch", 2),
        *("--micro-batch", 2, "--steps", 2, "--save", tmp_path / "run"),
    )
    assert status == 0, out + err
    tuned = tmp_path / "tuned"
    status, out, err = convert("export", "--ckpt", tmp_path / "run", "--out", tuned)
    assert status == 0 and "equal: over 256 tokens" in out, out + err
    status, out, err = convert("verify", "--hf", tuned, "--ckpt", tmp_path / "run")
    assert status == 0 and "equal: over 256 tokens" in out, out + err
    save_model(tmp_path / "other", CATALOG["gpt2-tiny"].with_layers(2), seed=1)
    status, out, err = convert("verify", "--hf", tmp_path / "other", "--ckpt", tmp_path / "run")
    assert status == 1 and "NOT EQUAL: over" in out and "computes other logits than transformers" in err, out + err
    shutil.copytree(tuned, tmp_path / "configured")
    config = tmp_path / "configured" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"activation_function": "relu"}))
    status, out, err = convert("verify", "--hf", tmp_path / "configured", "--ckpt", tmp_path / "run")
    assert status == 1 and "NOT EQUAL: over" in out, "its weights are the same, and what is computed of them is not"
    save_model(tmp_path / "deeper", CATALOG["gpt2-tiny"].with_layers(3))
    for words, said in (
        (("verify", "--hf", tuned), "there are no tensor-parallel blocks to compare with; add --ckpt CKPT"),
        (("verify", "--hf", tuned, "--ckpt", tmp_path / "run", "--tp", 2), "tensor-parallel blocks. Omit tp and pp."),
        (("verify", "--hf", tmp_path / "deeper", "--ckpt", tmp_path / "run"), "num_layers 2 there, 3 here"),
        (
            ("import", "--hf", tmp_path / "tuned", "--out", tmp_path / "new"),
            f"megabench train --model {tmp_path / 'tuned'}",
        ),
    ):
        status, out, err = convert(*words)
        assert status == 2 and err.count("\n") == 1 and said in err, out + err


def test_a_layout_that_does_not_fit(tmp_path: Path, folder: Path) -> None:
    status, out, err = convert("import", "--hf", folder, "--out", tmp_path / "checkpoint", "--pp", 3)
    assert status == 2 and err.count("\n") == 1 and err.startswith("Error: ") and not out
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_model(tmp_path: Path, folder: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    status, _, err = convert("import", "--hf", damaged, "--out", tmp_path / "checkpoint")
    assert status == 2 and err.count("\n") == 1 and "model.safetensors is not a complete safetensors file" in err
    status, _, err = run("launch/pretrain.py", "--model", damaged, "--device", "cpu")
    assert status == 2 and err.count("\n") == 1 and "model.safetensors is not a complete safetensors file" in err


def test_launched_by_torchrun(tmp_path: Path, folder: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    status, out, err = run(*torchrun, "tools/convert.py", "verify", "--hf", folder, "--tp", 2)
    assert status == 0 and out.count("equal: over 256 tokens") == 1, out + err
