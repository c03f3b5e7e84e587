"""Records as a trainer would write them, for tests."""

from megabench.record import LayoutSizes, PeakMemory, RunRecord, StepSeconds, TflopsPerDevice, WorkClass


def make_record(losses: list[float], speed: float = 1000.0, **changes: object) -> RunRecord:
    """A good record with these losses, but for fields that `changes` names."""
    fields = {
        "trial": "run",
        "engine": "megatron",
        "layout": LayoutSizes(tp=1, cp=1, pp=1, vp=1, dp=2),
        "options": {"zero_stage": None, "recompute": "none"},
        "optimizer": "adamw",
        "work_class": work_class(),
        "status": "ok",
        "world_size": 2,
        "num_hosts": 1,
        "device": "cpu",
        "model": "llama-tiny",
        "num_parameters": 1,
        "seq_length": 256,
        "micro_batch": 4,
        "global_batch": 16,
        "precision": "fp32",
        "grad_dtype": "fp32",
        "num_steps": len(losses),
        "warmup_steps": 1,
        "step_seconds": StepSeconds(median=0.5, p10=0.49, p90=0.51, all=[0.49, 0.5, 0.51]),
        "tokens_per_second": 2 * speed,
        "tokens_per_second_per_device": speed,
        "model_tflops_per_device": TflopsPerDevice(causal=1.5, full=2.0),
        "peak_memory_gib": PeakMemory(max=1.25, per_rank=[1.0, 1.25]),
        "losses": losses,
        "command": "torchrun --nproc-per-node 2 launch/pretrain.py",
    }
    return RunRecord.model_validate(fields | changes)


def work_class(**changes: object) -> WorkClass:
    fields = {
        "model": "llama-tiny",
        "num_layers": 8,
        "data": "stdlib",
        "data_sha256": "0" * 64,
        "seed": 1234,
        "optimizer": "adamw",
        "schedule": {"lr": 3e-3},
        "precision": "fp32",
        "grad_dtype": "fp32",
        "global_batch": 16,
        "seq_length": 256,
    }
    return WorkClass.model_validate(fields | changes)
