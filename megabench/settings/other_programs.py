"""Options of other programs that need more than another name, and what to use here instead. Loads no torch.

The programs are the Trainer of Hugging Face, accelerate, DeepSpeed, Megatron-LM, torchtitan, nanoGPT and Lightning. A
name that differs only in spelling is a synonym of its setting in `run_settings.py` instead.
"""

import re
from dataclasses import dataclass

_DP = "dp = processes / (tp · pp · cp)"
_TRACKERS = "for other trackers, write a callback: {callbacks=module:Class}"
_EVALUATION = (
    "write a callback that calls engine.evaluate (docs/callbacks.md has one), and add it with {callbacks=module:Class}"
)
_PROCESSES = (
    "set the number of processes: --nproc {|N} of megabench train, --nproc-per-node {|N} of torchrun, or world_size "
    "of a study"
)
_TORCHRUN = (
    "use torchrun on each host: torchrun --nnodes N --nproc-per-node G --rdzv-endpoint HOST:PORT -m megabench.train"
)
_ALWAYS_FUSED = "omit it: attention and other kernels are fused by default ({kernels=auto})"
_SHAPE = "use {model}, which sets all sizes: a name of the catalogue, or a directory with a config.json"
_DENSE = "omit it: megabench trains dense models, not mixtures of experts"
_MAPPED = "omit it: the ranks map token files into memory, and need no worker processes"

# The keys are names, or names with one value ("engine=zero3"), separated by spaces. They are in lower case, and have
# underscores for hyphens. In the answers, "{engine=deepspeed zero_stage=3}" are settings with values, "{tp}" is a
# setting without a value, and "{save=?DIR}" is a setting with the value that the user gave, or DIR. "{|ratio}" is the
# number that the user gave, or the word "ratio".
_ANSWERS = {
    # batch
    "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches accumulation_steps grad_accum_steps": (
        "set {global_batch}: global_batch = micro_batch · dp · {|accumulation steps}, with " + _DP
    ),
    "num_microbatches num_micro_batches n_microbatches gas": (
        "set {global_batch}: global_batch = micro_batch · dp · {|micro-batches}, with " + _DP
    ),
    "batch_size batch bs bsz": (
        "use {micro_batch=?N} if this is per GPU, or {global_batch=?N} if it is per optimizer step: global_batch = "
        "micro_batch · dp · accumulation steps"
    ),
    "pipeline_parallel_microbatch_size": "use {micro_batch=?N}",
    "auto_find_batch_size": "use {micro_batch=auto}, which finds the fastest micro-batch in short runs",
    "rampup_batch_size": "omit it: {global_batch} is the same in every step",
    # length of the run
    "num_train_epochs num_epochs max_epochs epochs n_epochs": (
        "set {steps}: steps = {|epochs} · tokens of the data / (global_batch · seq_length); megabench preprocess "
        "prints the number of tokens"
    ),
    "train_samples max_samples": "set {steps}: steps = {|samples} / global_batch",
    "train_tokens max_tokens total_tokens num_tokens tokens": (
        "set {steps}: steps = {|tokens} / (global_batch · seq_length)"
    ),
    "exit_interval": "use {steps=?N}",
    "exit_duration_in_mins": "omit it: a run with {save=DIR} saves and ends when it receives SIGTERM",
    # learning rate
    "warmup_steps lr_scheduler.warmup_steps": (
        "use {lr_warmup=?N} for the warm-up of the learning rate; {warmup_steps} is the number of first steps that are "
        "not timed"
    ),
    "warmup_ratio lr_warmup_fraction": "set {lr_warmup}: lr_warmup = {|ratio} · steps",
    "lr_warmup_samples": "set {lr_warmup}: lr_warmup = {|samples} / global_batch",
    "lr_decay_iters lr_decay_samples": "omit it: the learning rate decays until the last step ({steps})",
    "lr_scheduler.decay_ratio": "set {decay_steps} with {schedule=wsd}: decay_steps = {|ratio} · steps",
    "lr_scheduler.min_lr_factor": "set {min_lr}: min_lr = {|factor} · lr",
    "lr_scheduler.decay_type": "use {schedule=?NAME}",
    "lr_wsd_decay_style": "omit it: {schedule=wsd} decays linearly",
    "lr_scheduler_kwargs": "use {min_lr} and {decay_steps}",
    "schedule=constant_with_warmup": "use {schedule=constant} with {lr_warmup}",
    "schedule=cosine_with_min_lr": "use {schedule=cosine} with {min_lr}",
    "schedule=warmup_stable_decay": "use {schedule=wsd} with {decay_steps}",
    # optimizer
    "optimizer.name": "use {optimizer=?NAME}",
    "optimizer=adam optimizer=adamw_torch optimizer=adamw_torch_fused optimizer=adamw_hf optimizer=adamw_apex_fused "
    "optimizer=fused_adam optimizer=fusedadam optimizer=torch_adam optimizer=distributed_fused_adam": (
        "use {optimizer=adamw}"
    ),
    "adam_beta1 adam_beta2 beta1 beta2": "set both with {betas}, as in 0.9 0.95",
    "momentum sgd_momentum": "omit it: {optimizer=sgd} has no momentum",
    "optimizer.implementation": "omit it: the optimizer is fused by default",
    # precision
    "bf16": "use {precision=bf16}",
    "fp16 half": "use {precision=fp16}",
    "fp32": "use {precision=fp32}",
    "fp8 fp8_format fp8_hybrid float8 enable_float8_linear": "use {precision=fp8}",
    "tf32 allow_tf32": "omit it: megabench disables TF32 in fp32 runs",
    "amp autocast": "use {precision=bf16} or {precision=fp16}",
    "loss_scale initial_loss_scale fp16_opt_level": "omit it: {precision=fp16} scales the loss dynamically",
    "mixed_precision_param": "use {precision=?NAME}",
    "accumulate_allreduce_grads_in_fp32 mixed_precision_reduce": (
        "omit it, or use {grad_dtype=fp32}, which is the default"
    ),
    "precision=no precision=float32 precision=float precision=32 precision=32_true": "use {precision=fp32}",
    "precision=bfloat16 precision=bf16_mixed precision=bf16_true precision=torch.bfloat16": "use {precision=bf16}",
    "precision=float16 precision=half precision=16 precision=16_mixed precision=torch.float16": "use {precision=fp16}",
    "precision=float8 precision=hybrid precision=e4m3": "use {precision=fp8}",
    "grad_dtype=float32": "use {grad_dtype=fp32}",
    "grad_dtype=bfloat16": "use {grad_dtype=bf16}",
    "fp8_recipe=delayed fp8_recipe=blockwise fp8_recipe=mxfp8": "use {fp8_recipe=tensorwise}",
    # engine
    "fsdp use_fsdp fsdp2 use_torch_fsdp2 fully_shard fsdp_version fsdp=full_shard fsdp_sharding_strategy "
    "engine=fsdp2 engine=fsdp1 engine=fully_shard engine=torch_fsdp": "use {engine=fsdp}",
    "fsdp=shard_grad_op fsdp_sharding_strategy=shard_grad_op fsdp_sharding_strategy=2": (
        "use {engine=fsdp reshard_after_forward=false}, or {engine=deepspeed zero_stage=2}"
    ),
    "fsdp=no_shard fsdp_sharding_strategy=no_shard fsdp_sharding_strategy=3": "use {engine=ddp}",
    "fsdp=hybrid_shard fsdp_sharding_strategy=hybrid_shard fsdp_sharding_strategy=4 hsdp engine=hsdp": (
        "use {engine=fsdp}, and set {shard_size} to the number of GPUs of a host"
    ),
    "fsdp_config fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_use_orig_params "
    "fsdp_state_dict_type fsdp_backward_prefetch fsdp_sync_module_states": (
        "omit it: {engine=fsdp} shards every layer, and needs no wrapping policy"
    ),
    "fsdp_offload_params enable_cpu_offload": "use {engine=fsdp offload=all}",
    "fsdp_reshard_after_forward=false": "use {engine=fsdp reshard_after_forward=false}",
    "fsdp_reshard_after_forward": (
        "use {engine=fsdp reshard_after_forward=true}, the default, or {engine=fsdp reshard_after_forward=false} to "
        "keep the gathered weights for the backward pass"
    ),
    "ddp distributed_data_parallel engine=dp engine=data_parallel engine=distributed": "use {engine=ddp}",
    "ddp_find_unused_parameters ddp_bucket_cap_mb find_unused_parameters": "omit it: {engine=ddp} needs no such option",
    "use_deepspeed": "use {engine=deepspeed}",
    "zero zero_optimization_stage stage": "use {engine=deepspeed zero_stage=?3}",
    "zero_optimization": "use {engine=deepspeed zero_stage=3}, or your JSON: {engine=deepspeed deepspeed_config=FILE}",
    "zero0 engine=zero0 engine=zero_0 engine=deepspeed_stage_0": "use {engine=deepspeed zero_stage=0}",
    "zero1 engine=zero1 engine=zero_1 engine=deepspeed_stage_1": "use {engine=deepspeed zero_stage=1}",
    "zero2 engine=zero2 engine=zero_2 engine=deepspeed_stage_2": "use {engine=deepspeed zero_stage=2}",
    "zero3 zero3_init_flag engine=zero3 engine=zero_3 engine=zero engine=deepspeed_stage_3": (
        "use {engine=deepspeed zero_stage=3}"
    ),
    "deepspeed ds_config deepspeed_config_file": "use {engine=deepspeed deepspeed_config=?FILE}",
    "use_distributed_optimizer distributed_optimizer": (
        "omit it: the megatron engine always shards the optimizer state (ZeRO-1); DeepSpeed's ZeRO-1 is "
        "{engine=deepspeed zero_stage=1}"
    ),
    "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy": "use {engine=megatron_fsdp}",
    "use_megatron_lm engine=megatron_lm engine=megatron_core engine=mcore engine=nemo": "use {engine=megatron}",
    "engine=tp engine=tensor_parallel": "use {engine=megatron} and {tp}",
    "engine=pp engine=pipeline engine=pipeline_parallel": "use {engine=megatron} and {pp}",
    "engine=auto engine=accelerate engine=transformers engine=huggingface engine=hf engine=trainer": (
        "use {engine=ddp} if the model fits on one GPU, {engine=fsdp} otherwise, or ask megabench plan"
    ),
    "engine=nccl engine=gloo distributed_backend ddp_backend": "omit it: GPUs use NCCL, and CPUs use gloo",
    "overlap_grad_reduce overlap_param_gather overlap_comm tp_comm_overlap overlap_p2p_comm contiguous_gradients": (
        "omit it: communication overlaps with computation by default"
    ),
    # layout
    "dp dp_size data_parallel_size data_parallel_degree": (
        "set the number of processes instead, with --nproc or world_size: " + _DP
    ),
    "sequence_parallel": "omit it: sequence parallelism is on whenever {tp} is above 1",
    "num_layers_per_virtual_pipeline_stage": "set {vp}: vp = num_layers / (pp · {|layers per chunk})",
    "pipeline_parallel_schedule pipeline_schedule": "set {vp}: 1 is the schedule 1F1B, and 2 or more interleaved 1F1B",
    "ulysses_degree ulysses_sequence_parallel_size sequence_parallel_size sp_size sp_degree": "use {cp=?N}",
    "data_parallel_replicate_degree": "set {shard_size} with {engine=fsdp}: shard_size = processes / {|replicas}",
    "num_distributed_optimizer_instances": "set {shard_size}: shard_size = processes / (pp · {|instances})",
    "expert_model_parallel_size expert_tensor_parallel_size expert_parallel_size expert_parallel_degree ep ep_size "
    "num_experts moe_router_topk moe_layers": _DENSE,
    # memory
    "optimizer_cpu_offload offload_optimizer offload_optimizer_device": "use {engine=deepspeed offload=optimizer}",
    "cpu_offload offload_param offload_params offload_param_device offload=cpu offload=true offload=param": (
        "use {engine=deepspeed offload=optimizer}, {engine=deepspeed zero_stage=3 offload=all} or {engine=fsdp "
        "offload=all}"
    ),
    "offload=nvme": "use {engine=deepspeed zero_stage=3 offload=all}, which keeps all state in host memory",
    "gradient_checkpointing activation_checkpointing activation_checkpoint enable_gradient_checkpointing "
    "checkpoint_activations recompute=true recompute=block recompute=uniform": "use {recompute=full}",
    "activation_checkpoint.mode": "use {recompute=?full}",
    "recompute_activations selective_recompute recompute=op": "use {recompute=selective}",
    "recompute=false": "use {recompute=none}",
    "recompute_method recompute_num_layers": "omit it: {recompute=full} recomputes every layer",
    # kernels
    "torch_compile compile.enable use_compile dynamo_backend torch_compile_backend": (
        "use {engine=fsdp compile=true} or {engine=ddp compile=true}"
    ),
    "use_flash_attn use_flash_attention use_flash_attention_2 flash_attn flash_attention attn_implementation "
    "attention_backend transformer_impl attention_softmax_in_fp32 sdpa kernels=flash_attention_2 kernels=sdpa": (
        _ALWAYS_FUSED
    ),
    "use_liger_kernel use_liger liger_kernel": (
        "omit it: with {kernels=auto}, the engines for transformers models use Liger's kernels if liger-kernel is "
        "installed"
    ),
    "no_masked_softmax_fusion no_bias_gelu_fusion no_bias_swiglu_fusion no_bias_dropout_fusion no_rope_fusion "
    "no_gradient_accumulation_fusion": "use {kernels=reference} for unfused kernels",
    # model
    "hidden_size ffn_hidden_size intermediate_size num_attention_heads num_key_value_heads group_query_attention "
    "num_query_groups kv_channels vocab_size n_embd n_head d_model rotary_base rotary_percent position_embedding_type "
    "max_position_embeddings use_rotary_position_embeddings swiglu normalization norm_epsilon disable_bias_linear "
    "untie_embeddings_and_output_weights make_vocab_size_divisible_by init_method_std config_name model_type "
    "config_overrides": _SHAPE,
    "model.name model.flavor": "use {model}, for example {model=llama3-8b}",
    "init_from finetune": "use {model=DIR}: its weights start a new run, without optimizer state",
    "attention_dropout hidden_dropout dropout": "omit it: models are trained without dropout",
    "trust_remote_code": "omit it: megabench runs no code from model directories",
    "low_cpu_mem_usage": "omit it: each rank reads only its slices of the weights",
    "lora lora_r lora_rank lora_alpha lora_dropout lora_target_modules use_lora use_peft peft": (
        "omit it: megabench trains all parameters, without LoRA"
    ),
    "load_in_8bit load_in_4bit bnb_4bit_quant_type quantization": (
        "omit it: megabench trains all parameters, without quantized weights"
    ),
    # data
    "train_file train_files train_data train_dataset data_files": "use {data=?FILE}: a .txt, .jsonl or .parquet file",
    "dataset_name dataset_config_name hf_dataset": (
        "use {data=FILE} with a local file: hf download --repo-type dataset {|NAME} --local-dir DIR"
    ),
    "mock_data synthetic_data": "use {data=synthetic}",
    "hf_assets_path": "use {tokenizer=?DIR}",
    "tokenizer_type vocab_file merge_file merges_file": (
        "use {tokenizer=DIR} with a Hugging Face tokenizer directory, or {tokenizer=bytes}"
    ),
    "num_workers dataloader_num_workers dataloader_pin_memory data_cache_path dataloader_type streaming": _MAPPED,
    "preprocessing_num_workers": "use megabench preprocess --workers {|N}",
    "packing group_by_length remove_unused_columns reset_position_ids": (
        "omit it: every sequence is filled with tokens, and needs no padding"
    ),
    # checkpoints
    "output_dir default_root_dir": "use {save=?DIR} for checkpoints, and {out=DIR} for record and TensorBoard files",
    "dump_folder": "use {out=?DIR}, and {save=DIR} for checkpoints",
    "overwrite_output_dir": "use another {out=DIR}: a run overwrites no other run, and {load=DIR} resumes one",
    "save_strategy": "use {save_every=N}, a number of steps",
    "checkpoint.interval": "use {save_every=?N}",
    "checkpoint.folder": "use {save=?DIR}",
    "checkpoint.enable checkpoint.enable_checkpoint": "use {save=DIR}, and {load=DIR} to resume",
    "checkpoint.load_step": "use {load=DIR/step-N}",
    "async_save": "use {save_mode=async}",
    "save_mode=disabled save_mode=false": "use {save_mode=sync}",
    "save_mode=async_with_pinned_mem save_mode=true": "use {save_mode=async}",
    "no_load_optim no_load_rng no_save_optim no_save_rng save_only_model": (
        "use {model=DIR} to start from the weights of a checkpoint alone"
    ),
    "ckpt_format dist_ckpt_format use_dist_ckpt auto_detect_ckpt_format save_safetensors": (
        "omit it: every layout reads the checkpoints, and megabench convert export writes safetensors"
    ),
    "push_to_hub hub_model_id hub_token": "use megabench convert export, and then hf upload",
    # output
    "report_to": "use {out=DIR} or {tensorboard=DIR} for TensorBoard files; " + _TRACKERS,
    "report_to=none": "omit it: without {out} and {tensorboard}, a run writes no files",
    "enable_tensorboard": "use {tensorboard=DIR}, or {out=DIR}",
    "wandb wandb_project wandb_log wandb_exp_name wandb_run_name wandb_save_dir wandb_entity enable_wandb mlflow "
    "with_tracking": "use {tensorboard=DIR} for TensorBoard files; " + _TRACKERS,
    "run_name experiment_name": "use {out=?DIR}",
    "logging_strategy logging_first_step": "use {log_every=N}, a number of steps",
    "log_throughput log_params_norm log_timers_to_tensorboard disable_tqdm": (
        "omit it: the log shows loss, gradient norm, tokens per second and memory"
    ),
    "use_pytorch_profiler profile_step_start profile_step_end enable_profiling timing_log_level": "use {profile=true}",
    # evaluation
    "eval_steps eval_interval eval_iters eval_strategy evaluation_strategy do_eval per_device_eval_batch_size "
    "eval_batch_size validation_file valid_file eval_file valid_data_path test_data_path split val_check_interval "
    "validation.enable validation.steps validation.freq validation.dataset load_best_model_at_end "
    "metric_for_best_model early_stopping bf16_full_eval fp16_full_eval": _EVALUATION,
    "do_predict compute_metrics predict_with_generate": "omit it: megabench only trains",
    # processes
    "num_processes num_gpus n_gpus ngpus gpus devices nproc nproc_per_node num_gpus_per_node gpus_per_node "
    "world_size": _PROCESSES,
    "nnodes num_nodes nodes num_machines machine_rank node_rank master_addr master_port main_process_ip "
    "main_process_port rdzv_endpoint rdzv_backend hostfile": _TORCHRUN,
    "local_rank rank": "omit it: the launcher sets the rank of each process",
    "multi_gpu do_train": "omit it: megabench train trains with one process per GPU",
    "gpu_ids gpu_id gpu cuda_visible_devices": "set the variable CUDA_VISIBLE_DEVICES={|0,1}",
    "use_cpu no_cuda cpu": "use {device=cpu}",
    "accelerator": "use {device=?auto}",
    "device=gpu device=cuda:0 device=nvidia": "use {device=cuda}",
    "distributed_timeout_minutes ddp_timeout train_timeout_seconds init_timeout_seconds": (
        "set {stall_seconds}, the number of seconds without progress after which a run aborts"
    ),
    "check_for_nan_in_loss_and_grad no_check_for_nan_in_loss_and_grad": "use {nan_tolerance=0}",
    "config_file job.config_file": "use --config FILE, a YAML file with settings of megabench",
    "h": "use --help",
    # fields of study files, which are given to a run
    "base trials reference": "a file with these fields is a study: megabench compare FILE",
}
ANSWERS = {name: answer for names, answer in _ANSWERS.items() for name in names.split()}

_BRACES = re.compile(r"\{([^}]*)\}")


@dataclass(frozen=True)
class SettingNamed:
    """A setting that an answer names.

    `value` is None if the answer names no value. If `is_given`, the value of the user replaces `value`, which is only a
    placeholder.
    """

    name: str
    value: str | None = None
    is_given: bool = False


def parts(answer: str) -> list[str | list[SettingNamed]]:
    """Split an answer into text and groups of settings. "|ratio" is text for which a number of the user is put."""
    found: list[str | list[SettingNamed]] = []
    for index, text in enumerate(_BRACES.split(answer)):
        if index % 2 == 0 or text.startswith("|"):
            found.append(text)
        else:
            found.append([_named(word) for word in text.split()])
    return found


def _named(word: str) -> SettingNamed:
    name, separator, value = word.partition("=")
    return SettingNamed(name, value.removeprefix("?") if separator else None, value.startswith("?"))


def plain_name(word: str) -> str:
    """Return the spelling of names in `ANSWERS`: "--Use-FSDP" → "use_fsdp"."""
    return word.lstrip("-").replace("-", "_").lower()
