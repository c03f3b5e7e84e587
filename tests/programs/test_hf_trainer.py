"""The settings of the program hf_trainer, which are checked before any process starts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megabench.config import ConfigError, RunConfig
from megabench.record import KernelTraits
from megabench.specs.registry import ENGINES, PROGRAMS
from megabench.study.from_trainer import write_trainer_study
from megabench.study.program_answers import program_sentences
from megabench.study.study import StudyError, StudyFile, plan_study
from megabench.study.summary import summarize
from megabench.train.run_record import work_class
from tests.study.records import make_record

TINY: dict[str, Any] = {"engine": "hf_trainer", "model": "llama-tiny", "device": "cpu"}


@pytest.fixture
def arguments(tmp_path: Path) -> Path:
    return tmp_path / "arguments.json"


def resolve(**fields: Any) -> Any:
    return RunConfig.parse(TINY | fields).resolve(2, "cpu")


def test_arguments_are_settings(arguments: Path) -> None:
    given: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "learning_rate": 1e-3}
    given |= {"adam_beta2": 0.99, "gradient_checkpointing": True, "lr_scheduler_type": "cosine", "bf16": True}
    arguments.write_text(json.dumps(given | {"max_steps": 50, "output_dir": "out", "optim": "adamw_torch"}))
    run = resolve(trainer_args=arguments, global_batch=12)
    assert (run.micro_batch, run.num_micro_batches, run.lr, run.betas) == (2, 3, 1e-3, (0.9, 0.99))
    assert (run.recompute, run.schedule, run.min_lr, run.precision, run.steps) == ("full", "cosine", 0.0, "bf16", 50)
    assert resolve(trainer_args=arguments, global_batch=12, steps=7, warmup_steps=2).steps == 7


def test_a_warm_up_is_a_number_of_steps_or_a_share(tmp_path: Path, arguments: Path) -> None:
    for given, expected in ((100.0, 100), (0.0, 0), (0.1, 2), (3, 3)):
        arguments.write_text(json.dumps({"warmup_steps": given}))
        write_trainer_study(tmp_path / "mine.yaml", arguments, None, "llama-tiny", 2)
        (mine, _) = plan_study(StudyFile.read(tmp_path / "mine.yaml"), tmp_path / "mine.yaml", 2, "cpu").trials
        assert mine.resolved.lr_warmup == expected


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a setting of the run": ({"learning_rate": 1e-3}, {"lr": 1e-4}, r"sets lr=0.001, but the run sets lr=0.0001"),
    "accumulation": ({"gradient_accumulation_steps": 3}, {"global_batch": 8, "micro_batch": 1}, "use global_batch=6"),
    "a DeepSpeed JSON": ({"deepspeed": "ds.json"}, {}, "give the trial deepspeed_config=ds.json"),
    "divided batches": (
        {"accelerator_config": {"split_batches": True}},
        {},
        "sets split_batches, which changes the ba",
    ),
    "other batches": ({"auto_find_batch_size": True}, {}, "sets auto_find_batch_size, which changes the batch"),
    "an optimizer": ({"optim": "adafactor"}, {}, "sets optim='adafactor', .* use adamw_torch"),
    "no object": ({"fsdp": True, "fsdp_config": "fsdp.json"}, {}, "fsdp_config in .* must be an object"),
    "steps": ({"max_steps": "many"}, {}, "steps='many' is not valid"),
    "a list of schedules": ({"lr_scheduler_type": ["linear"]}, {}, r"lr_scheduler_type=\['linear'\], which the runs"),
    "two precisions": ({"bf16": True, "fp16": True}, {}, "sets both bf16 and fp16; set one"),
    "a schedule": ({"lr_scheduler_type": "polynomial"}, {}, "lr_scheduler_type='polynomial', which the runs"),
    "fp8": ({}, {"precision": "fp8"}, "hf_trainer has no precision=fp8; use bf16, fp16 or fp32"),
    "parameter groups": ({}, {"param_groups": "norm: weight_decay=0.1"}, "hf_trainer has no param_groups"),
    "no clipping": ({}, {"clip_grad": 0}, "reports the gradient norm only if it clips"),
    "checkpoints": ({}, {"save": "checkpoints"}, "saves no checkpoints"),
    "other axes": ({}, {"tp": 2}, "supports only data parallelism"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, arguments: Path) -> None:
    given, fields, message = REFUSED[case]
    arguments.write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=message):
        resolve(trainer_args=arguments, **fields)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"train_batch_size": 9}, 'sets train_batch_size=9, but it is 8 in the run; use "auto"'),
    "clipping": ({"gradient_clipping": 0.5}, "sets gradient_clipping=0.5, but it is 1.0 in the run"),
    "precision": ({"bf16": {"enabled": True}}, "sets bf16.enabled=True, but the run has precision=fp32"),
    "optimizer": ({"optimizer": {"type": "Lion"}}, "has the optimizer Lion, but"),
    "no object": ({"zero_optimization": 3}, "zero_optimization in the DeepSpeed JSON must be an object"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_deepspeed_json_must_not_contradict_the_run(case: str, tmp_path: Path) -> None:
    content, message = CONTRADICTIONS[case]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        run = resolve(deepspeed_config=path, global_batch=8, micro_batch=1)
        run.spec.mode(run.options)


MODES: dict[str, tuple[dict[str, Any] | None, dict[str, Any], str, bool]] = {
    "plain": (None, {}, "DDP", True),
    "FSDP2": (None, {"fsdp": True}, "FSDP2", True),
    "FSDP1": (None, {"fsdp": True, "fsdp_config": {"fsdp_version": 1}}, "FSDP1", False),
    "no ZeRO": ({}, {}, "ZeRO-0", False),
    "ZeRO": ({"zero_optimization": {"stage": 2}}, {"fsdp": True}, "ZeRO-2", True),
    "compiled ZeRO": ({"zero_optimization": {"stage": 2}}, {"torch_compile": True}, "ZeRO-2", False),
}


@pytest.mark.parametrize("case", MODES)
def test_modes_and_whether_their_state_can_be_read(case: str, tmp_path: Path, arguments: Path) -> None:
    deepspeed, given, mode, is_readable = MODES[case]
    arguments.write_text(json.dumps(given))
    fields: dict[str, Any] = {"trainer_args": arguments, "precision": "bf16"}
    if deepspeed is not None:
        fields["deepspeed_config"] = tmp_path / "ds.json"
        fields["deepspeed_config"].write_text(json.dumps(deepspeed))
    run = resolve(**fields)
    assert run.spec.mode(run.options) == mode and run.has_readable_state == is_readable
    assert (run.why_no_sketches is None) == is_readable


@pytest.mark.parametrize("by", ["gradient_checkpointing", "activation_checkpointing", "fsdp"])
def test_recomputation_has_three_names(by: str, arguments: Path) -> None:
    given: dict[str, Any] = {by: True}
    if by == "fsdp":
        given["fsdp_config"] = {"activation_checkpointing": "true"}
    arguments.write_text(json.dumps(given))
    assert resolve(trainer_args=arguments).recompute == "full"


def test_work_that_the_program_does_otherwise_is_a_class_of_its_own(tmp_path: Path) -> None:
    scheduled = tmp_path / "scheduled.json"
    scheduled.write_text(json.dumps({"scheduler": {"type": "WarmupLR"}}))
    sends_bf16 = tmp_path / "bf16.json"
    sends_bf16.write_text(json.dumps({"communication_data_type": "bf16", "zero_optimization": {"stage": 1}}))
    for fields, other in (
        ({"trainer_args": "fsdp2", "precision": "bf16"}, {"grad_dtype": "bf16"}),
        ({"trainer_args": "fsdp2"}, {}),
        ({"deepspeed_config": "zero3", "precision": "bf16"}, {}),
        ({"grad_dtype": "bf16", "precision": "bf16"}, {"grad_dtype": "fp32"}),
        ({"deepspeed_config": sends_bf16, "precision": "bf16"}, {"grad_dtype": "bf16"}),
        ({"deepspeed_config": sends_bf16, "precision": "bf16", "grad_dtype": "bf16"}, {}),
        ({"deepspeed_config": scheduled}, {"schedule": {"schedule": "that of the DeepSpeed JSON"}}),
    ):
        run = resolve(**fields)
        assert run.spec.other_work(run) == other
        source = SimpleNamespace(name="stdlib", sha256="0" * 64)
        plain = resolve(engine="ddp", precision=run.precision, grad_dtype=run.grad_dtype)
        assert (work_class(run, source).id == work_class(plain, source).id) == (not other)


def test_accelerate_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megabench.specs.hf_trainer.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs accelerate, .* pip install 'megabench\[programs\]'"):
        resolve()


def study(tmp_path: Path, *trials: dict[str, Any]) -> Any:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({"base": {"model": "llama-tiny", "device": "cpu"}, "trials": list(trials)}))
    return plan_study(StudyFile.read(path), path, 2, "cpu")


def test_trials_name_their_program(tmp_path: Path) -> None:
    assert not ENGINES.keys() & PROGRAMS.keys()
    trials = study(
        tmp_path,
        {"tp": 2},
        {"program": "hf_trainer"},
        {"program": "hf_trainer", "deepspeed_config": "zero3"},
        {"program": "hf_trainer", "trainer_args": "fsdp2"},
    ).trials
    assert [trial.name for trial in trials] == ["tp2", "hf-trainer-ddp", "hf-trainer-zero3", "hf-trainer-fsdp2"]
    for trial, message in (
        ({"program": "hf_trainr"}, "program='hf_trainr' is not known; did you mean hf_trainer"),
        ({"program": "hf_trainer", "engine": "ddp"}, "runs a program or an engine; remove program, or engine=ddp"),
    ):
        with pytest.raises(StudyError, match=message):
            study(tmp_path, trial)


def test_a_study_of_the_files_of_a_trainer(tmp_path: Path, arguments: Path) -> None:
    arguments.write_text(json.dumps({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": True}))
    path = tmp_path / "mine.yaml"
    write_trainer_study(path, arguments, Path("zero3-offload-a"), "llama-tiny", 2)
    mine, tuned = plan_study(StudyFile.read(path), path, 2, "cpu").trials
    run = mine.resolved
    assert (run.engine, run.global_batch, run.micro_batch, run.steps, run.warmup_steps) == ("hf_trainer", 16, 4, 20, 5)
    # the defaults of TrainingArguments
    assert (run.lr, run.min_lr, run.schedule, run.weight_decay, run.betas) == (5e-5, 0.0, "linear", 0.0, (0.9, 0.999))
    assert (tuned.name, tuned.config.micro_batch, tuned.config.recompute) == ("zero3-tuned", "auto", "auto")
    assert {trial.resolved.lr for trial in (mine, tuned)} == {5e-5}
    arguments.write_text(json.dumps({"max_steps": 100_000, "fsdp": True}))
    write_trainer_study(path, arguments, None, "llama-tiny", 2)
    mine, tuned = plan_study(StudyFile.read(path), path, 2, "cpu").trials
    assert (mine.resolved.precision, mine.resolved.steps, tuned.name) == ("fp32", 20, "fsdp-tuned")
    mine_by_hand = tmp_path / "by-hand.yaml"
    mine_by_hand.write_text("trials: []")
    with pytest.raises(StudyError, match="exists and is not a study that --trainer wrote"):
        write_trainer_study(mine_by_hand, arguments, None, None, 2)
    arguments.write_text(json.dumps({"deepspeed": str(path), "per_device_train_batch_size": "auto"}))
    with pytest.raises(StudyError, match="must be whole numbers"):
        write_trainer_study(path, arguments, None, None, 2)


def test_the_answer_names_what_a_program_does_otherwise() -> None:
    offload = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    fused = KernelTraits(fused_norm=True, fused_activation=True, fused_loss=True)
    plain = KernelTraits(fused_norm=False, fused_activation=False, fused_loss=False)
    records = [
        make_record([1.0], 4000.0, trial="best", engine="megatron", kernel_traits=fused, micro_batch=2),
        make_record(
            [1.0],
            1000.0,
            trial="mine",
            engine="hf_trainer",
            options={"deepspeed_config": offload, "recompute": "full"},
            kernel_traits=plain,
            micro_batch=1,
        ),
    ]
    (sentence,) = program_sentences(summarize(records, "best"), records)
    assert sentence == (
        "HF Trainer with ZeRO-3 (mine) trains 0.25 × as fast as best; what it does differently: unfused kernels of "
        "norms, activations and loss, the optimizer state in host memory, recomputation of all layers and "
        "micro-batches of 1 instead of 2."
    )
    assert list(program_sentences(summarize(records[1:], "mine"), records[1:])) == []
