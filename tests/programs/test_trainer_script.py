"""What `megabench compare --trainer "train.py …"` reads from a script, and the scripts that it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import ones
from torch.nn import Parameter
from torch.optim import SGD
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from megabench.programs.read_trainer_script import why_not_compared
from megabench.record import read_records
from megabench.study import trainer_script
from megabench.study.from_trainer import write_script_study
from megabench.study.study import Study, StudyError, StudyFile, plan_study
from megabench.study.trainer_script import script_command
from tests.comparison.compare_process import REAL, compare

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def study_of(*command: object, needs_length: bool = True) -> tuple[Study, dict[str, Any], str]:
    """The study of a script, its arguments as they were read, and the line about them."""
    path = Path("runs/mine.yaml").absolute()
    said = write_script_study(path, [str(word) for word in command], None, 2, needs_length)
    arguments = json.loads(Path("runs/mine-arguments.json").read_text())
    return plan_study(StudyFile.read(path), path, 2, "cpu"), arguments, said


def script(text: str) -> str:
    Path("train.py").write_text(text)
    return "train.py"


def test_a_script_that_parses_its_arguments(model: Path) -> None:
    zero = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
    Path("ds.json").write_text(json.dumps(zero))
    given = ["--output_dir", "out", "--deepspeed", "ds.json", "--bf16", "True", "--tf32", "True"]
    given += ["--per_device_train_batch_size", "4", "--warmup_steps", "3", "--max_steps", "100"]
    study, arguments, said = study_of(SCRIPTS / "parsed.py", "--model_name_or_path", model, *given)
    assert arguments == {
        "output_dir": "out",
        "per_device_train_batch_size": 4,
        "max_steps": 100,
        "warmup_steps": 3,
        "bf16": True,
        "tf32": True,
        "deepspeed": "mine-deepspeed.json",
    }
    assert json.loads(Path("runs/mine-deepspeed.json").read_text()) == zero
    mine, tuned = (trial.resolved for trial in study.trials)
    assert (mine.engine, mine.model, mine.seq_length, mine.micro_batch) == ("hf_trainer", str(model), 24, 4)
    assert (mine.lr_warmup, mine.steps, mine.precision, tuned.engine) == (3, 20, "bf16", "deepspeed")
    assert "mine-arguments.json, " in said and said.endswith(f"model={model}, seq_length=24 (the first batch)")
    assert f"# Read from {SCRIPTS / 'parsed.py'}\n" in Path("runs/mine.yaml").read_text()
    assert not Path("out").exists()


def test_a_script_with_its_arguments_and_its_model_in_code() -> None:
    study, arguments, _ = study_of(SCRIPTS / "in_code.py")
    assert arguments["warmup_steps"] == 0.1 and arguments["gradient_checkpointing"] is True
    zero = json.loads(Path("runs/mine-deepspeed.json").read_text())
    assert zero["zero_optimization"]["stage"] == 3 and zero["train_batch_size"] == "auto"
    run = study.trials[0].resolved
    assert (run.lr, run.schedule, run.lr_warmup, run.recompute) == (1e-3, "cosine", 2, "full")
    assert (run.global_batch, run.seq_length, run.shape.num_layers) == (8, 32, 2)
    assert Path(run.model) == Path("runs/mine-model").absolute() and (Path(run.model) / "model.safetensors").exists()
    assert not Path("out").exists()


def test_fsdp_and_a_model_that_the_script_changed(model: Path) -> None:
    study, arguments, _ = study_of(
        script(
            "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
            f"model = AutoModelForCausalLM.from_pretrained({str(model)!r})\n"
            "model.resize_token_embeddings(520)\n"
            "Trainer(model=model, args=TrainingArguments(fsdp=True), train_dataset=[{'input_ids': [1]}] * 8).train()\n"
        )
    )
    assert arguments["fsdp"] is True and study.trials[1].name == "fsdp-tuned"
    assert study.trials[0].resolved.shape.vocab_size == 520


def test_another_loss_is_refused_and_the_arguments_are_kept(model: Path) -> None:
    with pytest.raises(StudyError, match=r"Doubled replaces compute_loss of transformers.Trainer. .* use --trainer .*"):
        study_of(SCRIPTS / "own_loss.py", model)
    assert json.loads(Path("runs/mine-arguments.json").read_text()) == {"output_dir": "out"}
    assert not Path("runs/mine.yaml").exists()
    with pytest.raises(StudyError, match="Doubled replaces compute_loss"):  # what an earlier call wrote is replaced
        study_of(SCRIPTS / "own_loss.py", model)


def test_files_of_the_user_are_not_replaced(model: Path) -> None:
    Path("runs").mkdir()
    Path("runs/mine-deepspeed.json").write_text("{}")
    with pytest.raises(StudyError, match=r"mine-deepspeed\.json exists, and --trainer has not written it; use another"):
        study_of(SCRIPTS / "own_loss.py", model)


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def trainer(model: Any = None, **given: Any) -> Trainer:
    return Trainer(model=model or LlamaForCausalLM(LlamaConfig(**SIZES)), args=TrainingArguments(use_cpu=True), **given)


def frozen() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.lm_head.requires_grad_(False)
    return model


def with_loss() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.loss_function = print
    return model


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "an optimizer": (lambda: {"optimizers": (SGD([Parameter(ones(1))]), None)}, "its own optimizer to Trainer"),
    "a loss": (lambda: {"compute_loss_func": print}, "its own compute_loss_func to Trainer"),
    "a loss of the model": (lambda: {"model": with_loss()}, "a loss function of its own"),
    "frozen weights": (lambda: {"model": frozen()}, "trains only some of the parameters"),
    "a classifier": (lambda: {"model": BertForSequenceClassification(BertConfig(**SIZES))}, "is not a causal language"),
    "16-bit weights": (lambda: {"model": LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()}, "state are bfloat16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, problem = REFUSED[case]
    found = trainer(**given())
    assert problem in why_not_compared(found)
    monkeypatch.setattr(Trainer, "training_step", lambda *_: 0)
    assert why_not_compared(found) == "Trainer replaces training_step of transformers.Trainer"


def test_an_unknown_length_must_be_set(model: Path) -> None:
    name = script(
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(model)!r})\n"
        "Trainer(model=model, args=TrainingArguments(), train_dataset=[{'input_ids': [1, 2]}]).train()\n"
    )
    with pytest.raises(StudyError, match="is not a whole micro-batch of sequences; add --set seq_length=N"):
        study_of(name)
    assert "seq_length" not in study_of(name, needs_length=False)[2]


ENDED = {
    "too early": ("print('nothing to do')", "exit status 0 before it called Trainer.train.*: nothing to do; correct"),
    "an error": ("raise RuntimeError('no data')", "exit status 1 before .*: RuntimeError: no data; correct"),
    "arguments": (
        "import argparse; p = argparse.ArgumentParser(); p.add_argument('--data', required=True); p.parse_args()",
        "exit status 2 before .* error: the following arguments are required: --data; correct",
    ),
}


@pytest.mark.parametrize("case", ENDED)
def test_a_script_that_ends_before_it_trains(case: str) -> None:
    text, message = ENDED[case]
    with pytest.raises(StudyError, match=message):
        study_of(script(text))


def test_a_script_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_script, "_TIMEOUT_SECONDS", 1)
    with pytest.raises(StudyError, match=r"did not call Trainer.train\(\) within 1 s; prepare its data beforehand"):
        study_of(script("import time; time.sleep(60)"))


def test_a_script_that_needs_a_gpu_runs_again_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_script, "gpu_names", lambda: ["a", "b"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    needs_gpu = "import os; assert os.environ['CUDA_VISIBLE_DEVICES'] and 'ACCELERATE_USE_CPU' not in os.environ\n"
    with pytest.raises(StudyError, match=r"ended with exit status 0 .*: it sees 3; correct"):
        study_of(script(needs_gpu + "print('it sees', os.environ['CUDA_VISIBLE_DEVICES'])"))


def test_words_of_a_command() -> None:
    Path("my train.py").touch()
    assert script_command("'my train.py' --name 'two words'") == ["my train.py", "--name", "two words"]
    assert script_command("arguments.json") is None and script_command("zero3-offload-b") is None
    for given, message in (
        ("missing.py --x", "the script missing.py does not exist"),
        ("torchrun --nproc-per-node 4 train.py", "must begin with the script, not with torchrun; omit the launcher"),
        ("train.py 'x", "No closing quotation; correct the quotes"),
    ):
        with pytest.raises(StudyError, match=message):
            script_command(given)


@pytest.mark.e2e
def test_a_script_as_a_trial(model: Path) -> None:
    command = f"{SCRIPTS / 'parsed.py'} --model_name_or_path {model} --per_device_train_batch_size 2"
    few = ["--set", "steps=4", "--set", "warmup_steps=2", "--set", "device=cpu", "--set", "tokenizer=bytes"]
    out = Path("out").absolute()
    options = ["--nproc", 2, "--only", "yours", "--out", out, *few]
    status, said, errors = compare("--trainer", command, *options, command=REAL, OMP_NUM_THREADS="1")
    assert status == 0, said + errors
    (record,) = read_records(out / "results.jsonl")
    assert record.status == "ok" and record.engine == "hf_trainer" and record.seq_length == 24
    status, _, errors = compare("--trainer", "train.py --x", "--deepspeed", "ds.json", "--nproc", 2, command=REAL)
    assert status == 2 and errors.startswith("Error: ") and len(errors.splitlines()) == 1
