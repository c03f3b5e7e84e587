"""A script that sets its arguments, its DeepSpeed configuration and a model of its own in code."""

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ZERO = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
BATCH = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")

arguments = TrainingArguments(
    output_dir="out",
    bf16=True,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    warmup_steps=0.1,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    deepspeed={"zero_optimization": ZERO, "bf16": {"enabled": "auto"}, **BATCH},
    push_to_hub=True,
)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
model.gradient_checkpointing_enable()
rows = [{"input_ids": list(range(32)), "labels": list(range(32))}] * 2
Trainer(model=model, args=arguments, train_dataset=rows).train()
