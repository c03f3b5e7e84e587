"""Declares the settings that all engines share. Settings of a single engine are declared in `specs/`.

Flags, YAML fields, `--help`, docs/settings.md, the options in records and the rules for resumed runs are generated from
these declarations.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from megabench.parallel.placement import Policy
from megabench.precision import Fp8Recipe
from megabench.settings.bounds import (
    Epsilon,
    FinalLearningRate,
    GradientNorm,
    LearningRate,
    Multiple,
    NumLayers,
    NumLayersOrZero,
    NumRanks,
    NumSequences,
    NumSteps,
    NumStepsOrZero,
    NumTokens,
    Seconds,
    WeightDecay,
)
from megabench.settings.network_limit import NetworkLimit
from megabench.settings.setting import EngineSettings, Settings, setting

Beta = PositiveFloat  # RunConfig.resolve checks that betas are below 1


class RunSettings(Settings):
    """The settings of a run, as the user gives them. `own` contains the settings of the run's engine."""

    own: EngineSettings

    model: str = setting(
        "llama3-8b",
        "Model and data",
        "work",
        "content",
        synonyms="model_name model_name_or_path pretrained_model_name_or_path",
    )
    """Model: a name of the catalogue, or a Hugging Face or checkpoint directory."""

    num_layers: NumLayers | None = setting(
        None, "Model and data", "work", "content", synonyms="num_hidden_layers n_layers n_layer"
    )
    """Number of layers; overrides the model's."""

    engine: str = setting("megatron", "Engine and layout", "layout", "content", synonyms="backend strategy")
    """Engine that trains the model: its parallelism and optimizer."""

    tp: NumRanks = setting(
        1,
        "Engine and layout",
        "size",
        "free",
        synonyms="tensor_parallel_size tensor_model_parallel_size tp_size tensor_parallel_degree tensor_parallel",
    )
    """Tensor-parallel size; sequence parallelism is enabled with it."""

    pp: NumRanks = setting(
        1,
        "Engine and layout",
        "size",
        "free",
        synonyms="pipeline_parallel_size pipeline_model_parallel_size pp_size pipeline_parallel_degree "
        "pipeline_parallel",
    )
    """Number of pipeline stages."""

    vp: NumRanks = setting(
        1,
        "Engine and layout",
        "size",
        "free",
        synonyms="virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank vp_size",
    )
    """Model chunks per pipeline stage (interleaved schedule)."""

    cp: NumRanks = setting(
        1, "Engine and layout", "size", "free", synonyms="context_parallel_size cp_size context_parallel_degree"
    )
    """Context-parallel size."""

    placement: Policy = setting("topology", "Engine and layout", "machine", "free")
    """Placement of ranks: TP inside NVLink domains, the launcher's order, or TP across domains (for comparison)."""

    strict_placement: bool = setting(False, "Engine and layout", "machine", "free")
    """Refuse to start if a TP group would span NVLink domains."""

    emulate_hosts: NumRanks | None = setting(None, "Engine and layout", "machine", "free")
    """Divide the ranks of one machine into this many emulated hosts that communicate over sockets."""

    emulate_network: NetworkLimit | None = setting(None, "Engine and layout", "machine", "free")
    """Network of emulated hosts in studies, in GB/s each way and in µs: {gb_per_s: 1.5, latency_us: 50}."""

    seq_length: NumTokens | None = setting(
        None,
        "Batch",
        "work",
        "same",
        synonyms="seq_len sequence_length max_seq_len max_seq_length context_length max_length block_size",
    )
    """Tokens per sequence [default: the model's]."""

    micro_batch: NumSequences | Literal["auto"] | None = setting(
        None,
        "Batch",
        "layout",
        "free",
        synonyms="micro_batch_size per_device_train_batch_size local_batch_size train_micro_batch_size_per_gpu",
        searchable=True,
    )
    """Sequences per forward pass and model replica; auto finds the fastest that fits [default: the model's]."""

    global_batch: NumSequences | None = setting(
        None,
        "Batch",
        "work",
        "same",
        synonyms="global_batch_size train_batch_size",
    )
    """Sequences per optimizer step [default: the model's]."""

    steps: NumSteps = setting(
        100, "Run", "work", "mention", synonyms="train_iters max_steps max_iters num_steps training_steps"
    )
    """Number of optimizer steps, warm-up steps included."""

    warmup_steps: NumStepsOrZero = setting(5, "Run", "machine", "free")
    """Steps before timing starts; reported figures exclude them. The warm-up of the learning rate is lr_warmup."""

    optimizer: str = setting("adamw", "Optimizer", "work", "same", synonyms="optim")
    """Optimizer; sgd has no momentum, and adafactor and muon need ddp or ZeRO-0, whose ranks hold whole matrices."""

    lr: LearningRate | None = setting(None, "Optimizer", "work", "mention", synonyms="learning_rate")
    """Peak learning rate [default: the model's]."""

    lr_warmup: NumStepsOrZero | None = setting(
        None, "Optimizer", "work", "mention", synonyms="lr_warmup_steps lr_warmup_iters num_warmup_steps warmup_iters"
    )
    """Number of linear warm-up steps of the learning rate [default: the model's]."""

    schedule: str = setting(
        "cosine", "Optimizer", "work", "mention", synonyms="lr_scheduler_type lr_scheduler lr_decay_style lr_schedule"
    )
    """Decay of the learning rate after warm-up; wsd stays at the peak and decays linearly in the last steps."""

    decay_steps: NumSteps | None = setting(
        None, "Optimizer", "work", "mention", synonyms="lr_wsd_decay_iters lr_decay_steps num_decay_steps"
    )
    """Number of last steps in which schedule=wsd decays [default: a tenth of steps]."""

    min_lr: FinalLearningRate | None = setting(
        None, "Optimizer", "work", "mention", synonyms="lr_min min_learning_rate"
    )
    """Learning rate of the last step [default: a tenth of lr]."""

    betas: tuple[Beta, Beta] = setting((0.9, 0.95), "Optimizer", "work", "mention", synonyms="adam_betas")
    """AdamW's betas."""

    eps: Epsilon = setting(1e-8, "Optimizer", "work", "mention", synonyms="adam_eps adam_epsilon")
    """AdamW's epsilon."""

    weight_decay: WeightDecay = setting(0.1, "Optimizer", "work", "mention", synonyms="wd")
    """Weight decay of matrices; vectors are not decayed."""

    param_groups: str | None = setting(None, "Optimizer", "work", "mention", synonyms="parameter_groups")
    """Other values for parameters by name: "embed|norm: lr_scale=0.1 weight_decay=0 beta1=0.9 beta2=0.99; …"."""

    clip_grad: GradientNorm = setting(
        1.0,
        "Optimizer",
        "work",
        "mention",
        synonyms="gradient_clipping max_grad_norm grad_clip gradient_clip_val max_norm",
    )
    """Maximum global gradient norm; 0 disables clipping."""

    precision: str | None = setting(
        None, "Precision and kernels", "work", "mention", synonyms="dtype torch_dtype mixed_precision"
    )
    """Training dtype; fp8 is bf16 with fp8 products inside blocks [default: bf16 on GPU, fp32 on CPU]."""

    fp8_recipe: Fp8Recipe | None = setting(None, "Precision and kernels", "work", "mention")
    """tensorwise: E4M3, one scale per tensor; bf16-gradients: the same, but gradients in bf16 [default: tensorwise]."""

    num_layers_at_start_in_bf16: NumLayersOrZero = setting(0, "Precision and kernels", "work", "mention")
    """Number of first blocks that fp8 runs keep in bf16."""

    num_layers_at_end_in_bf16: NumLayersOrZero = setting(0, "Precision and kernels", "work", "mention")
    """Number of last blocks that fp8 runs keep in bf16."""

    grad_dtype: Literal["fp32", "bf16"] = setting(
        "fp32", "Precision and kernels", "work", "mention", synonyms="grad_accum_dtype reduce_dtype main_grads_dtype"
    )
    """Dtype in which every engine reduces gradients, and the least precise one in which it accumulates them."""

    kernels: Literal["auto", "reference"] = setting("auto", "Precision and kernels", "machine", "free")
    """auto: fused kernels where they are available; reference: plain torch, as in transformers."""

    recompute: Literal["none", "selective", "full", "auto"] = setting(
        "none",
        "Precision and kernels",
        "option",
        "free",
        synonyms="recompute_granularity",
        searchable=True,
    )
    """Activation recomputation: none, selective (attention), full (whole layers); auto finds the fastest that fits."""

    data: str = setting("stdlib", "Model and data", "work", "content", synonyms="data_path dataset dataset_path")
    """Training data: stdlib, synthetic, a .txt/.jsonl/.parquet file, or the prefix of a .bin/.idx token file."""

    tokenizer: str | None = setting(
        None,
        "Model and data",
        "work",
        "free",
        synonyms="tokenizer_name tokenizer_path tokenizer_model tokenizer_name_or_path",
    )
    """Tokenizer: bytes, or a Hugging Face tokenizer directory [default: the tokenizer in the model directory, or bytes
    for models of the catalogue]."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = setting(
        1234, "Model and data", "work", "same", synonyms="random_seed"
    )
    """Seed of the initial weights and of the order of the data."""

    data_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = setting(None, "Model and data", "work", "same")
    """Seed of the order of the data, if it is not the seed of the initial weights [default: seed]."""

    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Run", "machine", "free")
    """Device to train on."""

    skip_memory_check: bool = setting(False, "Run", "watch", "free")
    """Build the model even if its weights, gradients and optimizer state do not seem to fit into memory."""

    save: Path | None = setting(None, "Checkpoints", "output", "free", synonyms="checkpoint_dir save_dir")
    """Directory for checkpoints, shared by all hosts; the last step is always saved."""

    save_every: NumSteps | None = setting(
        None, "Checkpoints", "output", "free", synonyms="save_interval save_steps checkpoint_interval"
    )
    """Also save after every N steps."""

    keep: NumSteps | None = setting(None, "Checkpoints", "output", "free", synonyms="save_total_limit keep_latest_k")
    """Number of this run's newest checkpoints to keep; the newest healthy one is never deleted [default: all]."""

    save_mode: Literal["auto", "sync", "async"] = setting(
        "auto", "Checkpoints", "output", "free", synonyms="async_mode"
    )
    """sync: wait until a checkpoint is written; async: until it is in host memory; auto: async on GPUs if it fits."""

    load: Path | None = setting(
        None, "Checkpoints", "machine", "free", synonyms="resume resume_from_checkpoint load_dir load_checkpoint"
    )
    """Resume from the newest valid checkpoint in this directory (empty is allowed for --save), or from DIR/step-N."""

    nan_tolerance: NumStepsOrZero = setting(3, "Run", "machine", "free")
    """Number of consecutive steps with a non-finite loss or gradients that may be skipped."""

    on_nan: Literal["stop", "rollback"] = setting("stop", "Run", "machine", "free")
    """After nan_tolerance: stop, or restore the newest healthy checkpoint and skip the batches since then."""

    spike_multiple: Multiple = setting(3.0, "Run", "machine", "free")
    """With on_nan=rollback, also roll back if the loss exceeds this multiple of the median of the last 50 losses."""

    max_rollbacks: NumStepsOrZero = setting(3, "Run", "machine", "free")
    """Number of rollbacks after which the run stops at the next problem, counted across restarts."""

    stall_seconds: Seconds = setting(300.0, "Run", "watch", "free")
    """Abort the run if a step makes no progress for this long (four times as long for the first step)."""

    straggler_every: NumStepsOrZero = setting(50, "Run", "watch", "free")
    """Look for slow ranks after every N steps, outside the measured steps; 0 disables it."""

    profile: bool = setting(False, "Run", "watch", "free")
    """Profile one extra step after the last: time by part, and a Chrome trace in OUT/trace."""

    callbacks: str | None = setting(None, "Run", "watch", "free")
    """Your own callbacks, as module:Class or module:Class(name=value) separated by commas."""

    log_every: NumSteps | Literal["auto"] = setting(
        "auto", "Run", "watch", "free", synonyms="logging_steps log_freq log_interval log_every_n_steps"
    )
    """Print a line every N steps; auto prints at most about one line per second. The record keeps every step."""

    tensorboard: Path | None = setting(None, "Run", "output", "free", synonyms="tensorboard_dir logging_dir")
    """TensorBoard directory [default: OUT/tensorboard]."""

    sketches: Path | None = setting(None, "Run", "output", "free")
    """File for sketches of the first steps' gradients, weights and moments, which megabench parity compares."""

    initial_models: Path | None = setting(None, "Run", "output", "free")
    """Directory for the initial weights that programs such as hf_trainer load [default: below the temporary one]."""

    out: Path | None = setting(None, "Run", "output", "free")
    """Directory for record.json and TensorBoard files."""
