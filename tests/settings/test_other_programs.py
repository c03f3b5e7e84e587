"""Options of other programs lead to the right setting, with its value or a formula."""

import pytest

from megabench.config import FIELDS, SETTINGS, ConfigError, RunConfig, as_flag, choices_of, hint
from megabench.models.find import find_model
from megabench.settings.other_programs import ANSWERS, SettingNamed, parts, plain_name
from megabench.settings.reading import parse_yaml
from megabench.specs.hints import valid_value
from megabench.train.flags import parse_flags

# values in answers that stand for a name, a number or a path of the user
PLACEHOLDERS = {"N", "NAME"}

# command line of another program → what its error message says
COMMAND_LINES = {
    # Hugging Face: TrainingArguments and the run_clm example
    "--per_device_train_batch_size 4": "here it is --micro-batch 4: Sequences per forward pass and model replica",
    "--gradient_accumulation_steps 8": "set --global-batch: global_batch = micro_batch · dp · 8, with dp = processes",
    "--num_train_epochs 3": "set --steps: steps = 3 · tokens of the data / (global_batch · seq_length)",
    "--max_steps 500": "here it is --steps 500: Number of optimizer steps",
    "--warmup_steps 100": "use --lr-warmup 100 for the warm-up of the learning rate; --warmup-steps is the number of "
    "first steps that are not timed",
    "--warmup_ratio 0.03": "set --lr-warmup: lr_warmup = 0.03 · steps",
    "--learning_rate 2e-5": "here it is --lr 2e-5: Peak learning rate",
    "--lr_scheduler_type cosine": "here it is --schedule cosine: ",
    "--lr_scheduler_type constant_with_warmup": "use --schedule constant with --lr-warmup",
    "--lr_scheduler_type polynomial": "here it is --schedule (cosine, linear, constant, wsd): ",
    "--optim adamw_torch_fused": "use --optimizer adamw",
    "--adam_beta2 0.95": "set both with --betas, as in 0.9 0.95",
    "--max_grad_norm 1.0": "here it is --clip-grad 1.0: ",
    "--bf16": "use --precision bf16",
    "--bf16 True": "use --precision bf16",
    "--fp16 False": "omit it; to enable it, use --precision fp16",
    "--tf32 True": "omit it: megabench disables TF32",
    "--gradient_checkpointing": "use --recompute full",
    "--torch_compile": "use --engine fsdp --compile or --engine ddp --compile",
    "--fsdp full_shard": "use --engine fsdp",
    "--fsdp=shard_grad_op": "use --engine fsdp --no-reshard-after-forward, or --engine deepspeed --zero-stage 2",
    "--deepspeed ds.json": "use --engine deepspeed --deepspeed-config ds.json",
    "--output_dir out": "use --save out for checkpoints, and --out DIR for record and TensorBoard files",
    "--save_steps 500": "here it is --save-every 500: ",
    "--save_strategy epoch": "use --save-every N, a number of steps",
    "--save_total_limit 2": "here it is --keep 2: ",
    "--resume_from_checkpoint out": "here it is --load out: ",
    "--logging_steps 10": "here it is --log-every 10: ",
    "--report_to wandb": "use --out DIR or --tensorboard DIR for TensorBoard files; for other trackers, write",
    "--eval_steps 100": "write a callback that calls engine.evaluate",
    "--train_file corpus.txt": "use --data corpus.txt: a .txt, .jsonl or .parquet file",
    "--block_size 1024": "here it is --seq-length 1024: ",
    "--model_name_or_path gpt2": "here it is --model gpt2: ",
    "--attn_implementation flash_attention_2": "omit it: attention and other kernels are fused by default (--kernels",
    "--dataloader_num_workers 4": "omit it: the ranks map token files into memory",
    "--do_train": "omit it: megabench train trains",
    "--local_rank 0": "omit it: the launcher sets the rank",
    # accelerate
    "--num_processes 8": "set the number of processes: --nproc 8 of megabench train, --nproc-per-node 8 of torchrun",
    "--num_machines 2": "use torchrun on each host: torchrun --nnodes N",
    "--mixed_precision bf16": "here it is --precision bf16: ",
    "--mixed_precision no": "use --precision fp32",
    "--use_fsdp": "use --engine fsdp",
    "--fsdp_sharding_strategy HYBRID_SHARD": "use --engine fsdp, and set --shard-size to the number of GPUs of a host",
    "--offload_optimizer_device cpu": "use --engine deepspeed --offload optimizer",
    # DeepSpeed
    "--train_micro_batch_size_per_gpu 2": "here it is --micro-batch 2: ",
    "--stage 2": "use --engine deepspeed --zero-stage 2",
    "--stage3_prefetch_bucket_size 1000": "here it is --zero-prefetch 1000: ",
    # Megatron-LM
    "--tensor-model-parallel-size 8": "here it is --tp 8: ",
    "--pipeline-model-parallel-size 4": "here it is --pp 4: ",
    "--num-layers-per-virtual-pipeline-stage 2": "set --vp: vp = num_layers / (pp · 2)",
    "--sequence-parallel": "omit it: sequence parallelism is on whenever --tp is above 1",
    "--use-distributed-optimizer": "omit it: the megatron engine always shards the optimizer state (ZeRO-1); "
    "DeepSpeed's ZeRO-1 is --engine deepspeed --zero-stage 1",
    "--overlap-grad-reduce": "omit it: communication overlaps with computation by default",
    "--num-distributed-optimizer-instances 2": "set --shard-size: shard_size = processes / (pp · 2)",
    "--train-iters 1000": "here it is --steps 1000: ",
    "--train-samples 64000": "set --steps: steps = 64000 / global_batch",
    "--lr-decay-style WSD": "here it is --schedule wsd: ",
    "--lr-warmup-fraction 0.01": "set --lr-warmup: lr_warmup = 0.01 · steps",
    "--log-interval 10": "here it is --log-every 10: ",
    "--recompute-granularity selective": "here it is --recompute selective: ",
    "--recompute-activations": "use --recompute selective",
    "--use-flash-attn": "omit it: attention and other kernels are fused by default",
    "--fp8-format hybrid": "use --precision fp8",
    "--hidden-size 4096": "use --model, which sets all sizes",
    "--mock-data": "use --data synthetic",
    "--finetune": "use --model DIR: its weights start a new run",
    "--expert-model-parallel-size 4": "omit it: megabench trains dense models",
    # torchtitan
    "--parallelism.tensor_parallel_degree 2": "here it is --tp 2: ",
    "--parallelism.data_parallel_shard_degree 8": "here it is --shard-size 8: ",
    "--parallelism.data_parallel_replicate_degree 2": "set --shard-size with --engine fsdp: shard_size = processes / 2",
    "--training.local_batch_size 1": "here it is --micro-batch 1: ",
    "--training.seq_len 4096": "here it is --seq-length 4096: ",
    "--training.mixed_precision_param bfloat16": "use --precision bf16",
    "--optimizer.lr 3e-4": "here it is --lr 3e-4: ",
    "--optimizer.name AdamW": "use --optimizer adamw",
    "--lr_scheduler.warmup_steps 200": "use --lr-warmup 200 for the warm-up of the learning rate",
    "--activation_checkpoint.mode selective": "use --recompute selective",
    "--checkpoint.interval 500": "use --save-every 500",
    "--metrics.log_freq 10": "here it is --log-every 10: ",
    "--validation.steps 10": "write a callback that calls engine.evaluate",
    # torchrun, Lightning and nanoGPT
    "--dp 4": "set the number of processes instead, with --nproc or world_size: dp = processes / (tp · pp · cp)",
    "--gpus 8": "set the number of processes: --nproc 8",
    "--strategy deepspeed_stage_2": "use --engine deepspeed --zero-stage 2",
    "--backend nccl": "omit it: GPUs use NCCL, and CPUs use gloo",
    "--batch_size 4": "use --micro-batch 4 if this is per GPU, or --global-batch 4 if it is per optimizer step",
    "--dtype bfloat16": "use --precision bf16",
}


@pytest.mark.parametrize(("line", "answer"), COMMAND_LINES.items())
def test_an_option_of_another_program_leads_to_the_setting(line: str, answer: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_flags(line.split(), program="megabench train")
    option = line.replace("=", " ").split()[0]
    assert str(error.value).startswith(f"unknown option {option}; {answer}")


@pytest.mark.parametrize(
    ("setting", "value", "answer"),
    [
        ("engine", "zero3", "use engine=deepspeed and zero_stage=3"),
        ("engine", "FSDP", "use engine=fsdp"),
        ("engine", "qqqq", "use one of megatron, deepspeed, fsdp, megatron_fsdp, ddp"),
        ("optimizer", "adam", "use optimizer=adamw"),
        ("precision", "bfloat16", "use precision=bf16"),
        ("precision", 16, "use precision=fp16"),
        ("recompute", True, "use recompute=full"),
        ("recompute", [1], "use one of none, selective, full, auto"),
        ("schedule", "constant_with_warmup", "use schedule=constant with lr_warmup"),
        ("save_mode", "disabled", "use save_mode=sync"),
        ("device", "gpu", "use device=cuda"),
    ],
)
def test_a_value_of_another_program_leads_to_the_value(setting: str, value: object, answer: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig.parse({setting: value})
    assert answer in str(error.value)


def test_a_file_is_told_names_and_values() -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: unknown setting 'bf16'; use precision=bf16$"):
        RunConfig.parse({"bf16": True}, where="run.yaml: ")
    with pytest.raises(ConfigError, match="unknown setting 'bf16'; omit it; to enable it, use precision=bf16"):
        RunConfig.parse({"bf16": False})
    with pytest.raises(
        ConfigError, match="unknown setting 'fsdp'; use engine=fsdp and reshard_after_forward=false, or"
    ):
        RunConfig.parse({"fsdp": "shard_grad_op auto_wrap"})
    with pytest.raises(ConfigError, match="unknown setting 'zero_optimization'; use engine=deepspeed and zero_stage=3"):
        RunConfig.parse({"zero_optimization": {"stage": 3}})
    with pytest.raises(ConfigError, match="'trials'; a file with these fields is a study: megabench compare FILE"):
        RunConfig.parse({"trials": [{"tp": 2}]})


def groups_of(answer: str) -> list[list[SettingNamed]]:
    return [part for part in parts(answer) if isinstance(part, list)]


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_name_settings_that_exist_and_values_that_are_valid(name: str) -> None:
    answer = ANSWERS[name]
    assert name == plain_name(name) and name not in {word for about in SETTINGS.values() for word in about.synonyms}
    assert "=" not in name or name.partition("=")[2] not in map(str, choices_of_or_none(name.partition("=")[0]))
    for group in groups_of(answer):
        for one in group:
            assert one.name in SETTINGS, f"{name}: {answer}"
            if one.value is not None and one.value not in PLACEHOLDERS:
                assert valid_value(one.name, one.value) == one.value, f"{one.name}={one.value}"
        fields = {one.name: parse_yaml(one.value) for one in group if one.value not in (None, *PLACEHOLDERS)}
        RunConfig.parse(fields)  # settings of one engine have this engine beside them
        if "model" in fields and fields["model"] != "DIR":
            find_model(fields["model"])


def choices_of_or_none(setting: str) -> tuple[object, ...]:
    return choices_of(setting) if setting in FIELDS else ()


def test_only_one_name_is_a_setting_with_another_meaning_here() -> None:
    assert {name for name in ANSWERS if name in SETTINGS} == {"warmup_steps"}


def test_flags_of_answers_are_accepted() -> None:
    """An answer that a user copies is a valid command line."""
    for answer in {*ANSWERS.values()}:
        for group in groups_of(answer):
            if all(one.value not in (None, *PLACEHOLDERS) for one in group):
                words = " ".join(as_flag(one.name, one.value) for one in group).split()
                assert parse_flags(words) is not None


def test_answers_are_given_only_if_their_settings_can_be_used() -> None:
    assert hint("bf16", ["precision"]) == "use precision=bf16"
    assert hint("bf16", ["steps"], otherwise="no") == "no"
    assert hint("local_rank", ["steps"]) == "omit it: the launcher sets the rank of each process"
