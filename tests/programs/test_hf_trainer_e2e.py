"""A study runs transformers' Trainer in its own loop, and its losses and tensors are those of the engines."""

import json
from pathlib import Path

import pytest

from megabench.record import RunRecord, read_records
from tests.comparison.compare_process import REAL, REPOSITORY, compare

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ARGUMENTS = {
    "fsdp": {"fsdp": "full_shard auto_wrap"},
    "recompute": {"gradient_checkpointing": True, "save_strategy": "epoch", "num_train_epochs": 3},
    "wrapped": {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}},
    "smoothed": {"label_smoothing_factor": 0.1},
}
STUDY = """
base: {model: llama-tiny, num_layers: 2, seq_length: 64, device: cpu, world_size: 2, steps: 5, warmup_steps: 3}
trials:
  - {name: tp2, tp: 2, global_batch: 8, micro_batch: 2}
  - {name: hf-ddp, program: hf_trainer, global_batch: 8, micro_batch: 2}
  - {name: hf-zero2, program: hf_trainer, deepspeed_config: zero2.json, global_batch: 8, micro_batch: 4}
  - {name: hf-adamw, program: hf_trainer, deepspeed_config: adamw.json, global_batch: 8, micro_batch: 4}
  - {name: hf-zero3, program: hf_trainer, deepspeed_config: zero3, global_batch: 8, micro_batch: 1}
  - {name: hf-fsdp, program: hf_trainer, trainer_args: fsdp.json, global_batch: 8, micro_batch: 2}
  - {name: hf-recompute, program: hf_trainer, trainer_args: recompute.json, global_batch: 8, micro_batch: 2}
  - {name: hf-wrapped, program: hf_trainer, trainer_args: wrapped.json, global_batch: 8, micro_batch: 2}
  - {name: hf-nan, program: hf_trainer, global_batch: 8, micro_batch: 1, callbacks: "planted:NotFinite"}
  - {name: hf-smoothed, program: hf_trainer, trainer_args: smoothed.json, global_batch: 8, micro_batch: 2}
reference: tp2
"""
PLANTED = """
from megabench.train.callbacks import Callback


class NotFinite(Callback):
    def on_ready(self, trainer):
        next(trainer.engine._model.parameters()).data.fill_(float("nan"))
"""
SHARDED = {"hf-zero2": "ZeRO-2", "hf-zero3": "ZeRO-3", "hf-fsdp": "FSDP2"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def said(folder: Path) -> str:
    for name, arguments in ARGUMENTS.items():
        (folder / f"{name}.json").write_text(json.dumps(arguments))
    batch = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    zero2 = {"zero_optimization": {"stage": 2}, **batch}
    (folder / "zero2.json").write_text(json.dumps(zero2))
    given = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto") | {"torch_adam": True}
    (folder / "adamw.json").write_text(json.dumps(zero2 | {"optimizer": {"type": "AdamW", "params": given}}))
    study = STUDY
    for name in ("zero2", "adamw", *ARGUMENTS):
        study = study.replace(f"{name}.json", str(folder / f"{name}.json"))
    (folder / "study.yaml").write_text(study)
    (folder / "planted.py").write_text(PLANTED)
    path = f"{REPOSITORY}:{folder}"
    status, out, err = compare(
        folder / "study.yaml", "--out", folder / "out", command=REAL, OMP_NUM_THREADS="1", PYTHONPATH=path
    )
    assert status == 1, out + err  # one trial trains with another loss
    return out


@pytest.fixture(scope="module")
def records(said: str, folder: Path) -> dict[str, RunRecord]:
    return {record.trial: record for record in read_records(folder / "out" / "results.jsonl")}


@pytest.mark.parametrize("name", ["hf-ddp", *SHARDED, "hf-recompute", "hf-wrapped"])
def test_losses_and_tensors_are_those_of_the_reference(records: dict[str, RunRecord], name: str) -> None:
    parity = records[name].parity
    assert records[name].status == "ok" and parity and parity.tensors
    assert parity.max_relative_difference is not None and parity.max_relative_difference < 1e-5
    assert parity.tensors.num_tensors == 21 and parity.tensors.problems == []
    assert 0 < parity.tensors.part_of_tolerance < 1


def test_another_loss_shows(records: dict[str, RunRecord], said: str) -> None:
    """Arguments of the program that change the work are not ignored, and the trial is not ranked."""
    assert records["hf-smoothed"].status == "diverged"
    assert "DIVERGED" in said


def test_an_optimizer_in_the_json_has_the_learning_rates_of_the_run(records: dict[str, RunRecord]) -> None:
    """DeepSpeed instead of transformers changes them then. It also decays the norms, which the others do not."""
    adamw = records["hf-adamw"]
    assert adamw.learning_rates == pytest.approx(records["tp2"].learning_rates, rel=1e-12)
    assert adamw.parity.tensors.problems[0].startswith("weight_decay of 5 of 21 tensors is not that of the other run")


def test_a_loss_that_is_not_finite_ends_the_trial_with_one_sentence(records: dict[str, RunRecord]) -> None:
    failed = records["hf-nan"]
    assert failed.status == "failed" and failed.error and "not finite" in failed.error, failed.error
    assert "Error:" not in failed.error


def test_the_record_says_what_ran(records: dict[str, RunRecord], folder: Path) -> None:
    zero3, recompute = records["hf-zero3"], records["hf-recompute"]
    assert zero3.engine == "hf_trainer" and zero3.options["deepspeed_config"]["zero_optimization"]["stage"] == 3
    assert recompute.options["trainer_args"] == ARGUMENTS["recompute"] and recompute.options["recompute"] == "full"
    assert zero3.kernels and zero3.kernels["norm"] == "transformers RMSNorm" and "optimizer" in zero3.kernels
    assert "--engine hf_trainer" in zero3.command and "initial-models" not in zero3.command
    assert zero3.environment and {"accelerate", "transformers", "deepspeed"} <= zero3.environment.versions.keys()
    assert zero3.wire_bytes and set(zero3.wire_bytes) == {"dp"}
    assert len(zero3.losses) == 5 and zero3.step_seconds and zero3.tokens_per_second
    assert any("save_strategy" in warning for warning in recompute.warnings)
    assert not (folder / "out" / "initial-models").exists()


def test_the_answer_says_what_a_program_does_otherwise(said: str) -> None:
    assert "HF Trainer with ZeRO-3 (hf-zero3) trains " in said or "HF Trainer with ZeRO-3 (hf-zero3) is" in said
    for name, mode in SHARDED.items():
        assert f"{mode} ({name})" in said
