"""The settings of a run that all engines have, each declared once. Those of one engine are in `specs/`.

Flags, YAML fields, `--help`, the page of settings, record options, the rules for resumed runs and the names that other
programs use all follow from these declarations.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megabench.parallel.placement import Policy
from megabench.settings.setting import EngineSettings, Settings, setting

Beta = PositiveFloat  # checked to be below 1 in RunConfig.resolve


class RunSettings(Settings):
    """The settings of a run, as a user gives them; `own` are those of its engine."""

    own: EngineSettings
    model: str = setting(
        "llama3-8b",
        "Model: a name of the catalogue, or a Hugging Face or checkpoint directory.",
        panel="Model and data",
        role="work",
        resume="content",
        synonyms=("model_name", "model_name_or_path", "pretrained_model_name_or_path"),
    )
    num_layers: PositiveInt | None = setting(
        None,
        "Number of layers; overrides the model's.",
        panel="Model and data",
        role="work",
        resume="content",
        synonyms=("num_hidden_layers", "n_layers"),
    )
    engine: str = setting(
        "megatron",
        "Engine that trains the model: its parallelism and optimizer.",
        panel="Engine and layout",
        role="layout",
        resume="content",
        synonyms=("backend", "strategy"),
    )
    tp: PositiveInt = setting(
        1,
        "Tensor-parallel size; sequence parallelism is enabled with it.",
        panel="Engine and layout",
        role="layout",
        resume="free",
        synonyms=(
            "tensor_parallel_size",
            "tensor_model_parallel_size",
            "tp_size",
            "tensor_parallel_degree",
            "tensor_parallel",
        ),
    )
    pp: PositiveInt = setting(
        1,
        "Number of pipeline stages.",
        panel="Engine and layout",
        role="layout",
        resume="free",
        synonyms=(
            "pipeline_parallel_size",
            "pipeline_model_parallel_size",
            "pp_size",
            "pipeline_parallel_degree",
            "pipeline_parallel",
        ),
    )
    vp: PositiveInt = setting(
        1,
        "Model chunks per pipeline stage (interleaved schedule).",
        panel="Engine and layout",
        role="layout",
        resume="free",
        synonyms=("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "vp_size"),
    )
    cp: PositiveInt = setting(
        1,
        "Context-parallel size.",
        panel="Engine and layout",
        role="layout",
        resume="free",
        synonyms=("context_parallel_size", "cp_size", "context_parallel_degree"),
    )
    placement: Policy = setting(
        "topology",
        "Placement of ranks: TP inside NVLink domains, the launcher's order, or TP across domains (for comparison).",
        panel="Engine and layout",
        role="machine",
        resume="free",
    )
    strict_placement: bool = setting(
        False,
        "Refuse to start if a TP group would span NVLink domains.",
        panel="Engine and layout",
        role="machine",
        resume="free",
    )
    emulate_hosts: PositiveInt | None = setting(
        None,
        "Divide the ranks of one machine into this many emulated hosts that communicate over sockets.",
        panel="Engine and layout",
        role="machine",
        resume="free",
    )
    seq_length: PositiveInt | None = setting(
        None,
        "Tokens per sequence [default: the model's].",
        panel="Batch",
        role="work",
        resume="same",
        synonyms=("seq_len", "sequence_length", "max_seq_len", "context_length", "max_length"),
    )
    micro_batch: PositiveInt | Literal["auto"] | None = setting(
        None,
        "Sequences per forward pass and model replica; auto finds the fastest that fits [default: the model's].",
        panel="Batch",
        role="layout",
        resume="free",
        synonyms=(
            "micro_batch_size",
            "per_device_train_batch_size",
            "local_batch_size",
            "train_micro_batch_size_per_gpu",
        ),
        searchable=True,
    )
    global_batch: PositiveInt | None = setting(
        None,
        "Sequences per optimizer step [default: the model's].",
        panel="Batch",
        role="work",
        resume="same",
        synonyms=("batch_size", "global_batch_size", "train_batch_size", "gradient_accumulation_steps"),
    )
    steps: int = setting(
        100,
        "Number of optimizer steps, warm-up steps included.",
        ge=1,
        le=10**9,
        panel="Run",
        role="work",
        resume="mention",
        synonyms=("train_iters", "max_steps", "num_steps", "training_steps"),
    )
    warmup_steps: NonNegativeInt = setting(
        5,
        "Steps before timing starts; reported figures exclude them.",
        panel="Run",
        role="machine",
        resume="free",
    )
    optimizer: Literal["adamw", "sgd", "adafactor"] = setting(
        "adamw",
        "Optimizer (SGD has no momentum; Adafactor needs ddp or ZeRO-0, whose ranks hold whole matrices).",
        panel="Optimizer",
        role="work",
        resume="same",
        synonyms=("optim",),
    )
    lr: PositiveFloat | None = setting(
        None,
        "Peak learning rate [default: the model's].",
        panel="Optimizer",
        role="work",
        resume="mention",
        synonyms=("learning_rate",),
    )
    lr_warmup: NonNegativeInt | None = setting(
        None,
        "Number of linear warm-up steps of the learning rate [default: the model's].",
        panel="Optimizer",
        role="work",
        resume="mention",
        synonyms=("lr_warmup_steps", "lr_warmup_iters", "num_warmup_steps"),
    )
    min_lr: NonNegativeFloat | None = setting(
        None,
        "Learning rate at the end of the cosine decay [default: a tenth of lr].",
        panel="Optimizer",
        role="work",
        resume="mention",
        synonyms=("lr_min", "min_learning_rate"),
    )
    betas: tuple[Beta, Beta] = setting(
        (0.9, 0.95),
        "AdamW's betas.",
        panel="Optimizer",
        role="work",
        resume="mention",
        synonyms=("adam_betas", "adam_beta1", "adam_beta2"),
    )
    eps: PositiveFloat = setting(
        1e-8,
        "AdamW's epsilon.",
        panel="Optimizer",
        role="work",
        resume="mention",
        synonyms=("adam_eps", "adam_epsilon"),
    )
    weight_decay: NonNegativeFloat = setting(
        0.1,
        "Weight decay of matrices; vectors are not decayed.",
        panel="Optimizer",
        role="work",
        resume="mention",
        synonyms=("wd",),
    )
    clip_grad: NonNegativeFloat = setting(
        1.0,
        "Maximum global gradient norm; 0 disables clipping.",
        panel="Optimizer",
        role="work",
        resume="mention",
        synonyms=("gradient_clipping", "max_grad_norm", "grad_clip", "max_norm"),
    )
    precision: str | None = setting(
        None,
        "Training dtype [default: bf16 on GPU, fp32 on CPU].",
        panel="Precision and kernels",
        role="work",
        resume="mention",
        synonyms=("dtype", "torch_dtype", "mixed_precision", "bf16", "fp16"),
    )
    grad_dtype: Literal["fp32", "bf16"] = setting(
        "fp32",
        "Dtype in which every engine reduces gradients, and the least precise one in which it accumulates them.",
        panel="Precision and kernels",
        role="work",
        resume="mention",
        synonyms=("grad_accum_dtype", "reduce_dtype", "main_grads_dtype"),
    )
    kernels: Literal["auto", "reference"] = setting(
        "auto",
        "auto: fused kernels where they are available; reference: plain torch, as in transformers.",
        panel="Precision and kernels",
        role="machine",
        resume="free",
    )
    recompute: Literal["none", "selective", "full", "auto"] = setting(
        "none",
        "Activation recomputation: none, selective (attention), full (whole layers); auto finds the fastest that fits.",
        panel="Precision and kernels",
        role="option",
        resume="free",
        synonyms=(
            "activation_checkpointing",
            "gradient_checkpointing",
            "recompute_granularity",
            "activation_checkpoint",
        ),
        searchable=True,
    )
    data: str = setting(
        "stdlib",
        "Training data: stdlib, synthetic, a .txt/.jsonl/.parquet file, or the prefix of a .bin/.idx token file.",
        panel="Model and data",
        role="work",
        resume="content",
        synonyms=("data_path", "dataset", "dataset_path"),
    )
    tokenizer: str = setting(
        "bytes",
        "Tokenizer: bytes, or a Hugging Face tokenizer directory.",
        panel="Model and data",
        role="work",
        resume="free",
        synonyms=("tokenizer_name", "tokenizer_path", "tokenizer_model", "tokenizer_name_or_path"),
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = setting(
        1234,
        "Seed of the initial weights and of the order of the data.",
        panel="Model and data",
        role="work",
        resume="same",
        synonyms=("random_seed",),
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "Device to train on.",
        panel="Run",
        role="machine",
        resume="free",
    )
    save: Path | None = setting(
        None,
        "Directory for checkpoints, shared by all hosts; the last step is always saved.",
        panel="Checkpoints",
        role="output",
        resume="free",
        synonyms=("output_dir", "checkpoint_dir", "save_dir"),
    )
    save_every: PositiveInt | None = setting(
        None,
        "Also save after every N steps.",
        panel="Checkpoints",
        role="output",
        resume="free",
        synonyms=("save_interval", "save_steps", "checkpoint_interval"),
    )
    keep: PositiveInt | None = setting(
        None,
        "Number of this run's newest checkpoints to keep; the newest healthy one is never deleted [default: all].",
        panel="Checkpoints",
        role="output",
        resume="free",
        synonyms=("save_total_limit", "keep_latest_k"),
    )
    save_mode: Literal["auto", "sync", "async"] = setting(
        "auto",
        "sync: training waits until a checkpoint is written; async: only until "
        "it is copied to host memory; auto: async on GPUs if host memory suffices.",
        panel="Checkpoints",
        role="output",
        resume="free",
        synonyms=("async_save", "async_mode"),
    )
    load: Path | None = setting(
        None,
        "Resume from the newest valid checkpoint in this directory "
        "(it may be empty if it is also --save), or from DIR/step-N.",
        panel="Checkpoints",
        role="machine",
        resume="free",
        synonyms=("resume", "resume_from_checkpoint", "load_dir", "load_checkpoint"),
    )
    nan_tolerance: NonNegativeInt = setting(
        3,
        "Number of consecutive steps with a non-finite loss or gradients that may be skipped.",
        panel="Run",
        role="machine",
        resume="free",
    )
    stall_seconds: PositiveFloat = setting(
        300.0,
        "Abort the run if a step makes no progress for this long (four times as long for the first step).",
        panel="Run",
        role="watch",
        resume="free",
    )
    profile: bool = setting(
        False,
        "Profile one extra step after the last: time by part, and a Chrome trace in OUT/trace.",
        panel="Run",
        role="watch",
        resume="free",
    )
    callbacks: str | None = setting(
        None,
        "Your own callbacks, as module:Class separated by commas; modules are first searched in the working directory.",
        panel="Run",
        role="watch",
        resume="free",
    )
    tensorboard: Path | None = setting(
        None,
        "TensorBoard directory [default: OUT/tensorboard].",
        panel="Run",
        role="output",
        resume="free",
        synonyms=("tensorboard_dir", "logging_dir"),
    )
    out: Path | None = setting(
        None,
        "Directory for record.json and TensorBoard files.",
        panel="Run",
        role="output",
        resume="free",
    )
