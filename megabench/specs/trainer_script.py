"""What a script that trains with HF Trainer would train with. The process that runs the script writes it as JSON."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainerScript:
    """The configuration of a script at the moment it calls `Trainer.train`."""

    arguments: dict[str, Any]
    """The TrainingArguments that differ from the defaults of transformers, without `deepspeed`."""

    deepspeed: dict[str, Any] | None
    """The content of the DeepSpeed JSON."""

    problem: str | None = None
    """Why megabench cannot train as the script does. The fields below are then None."""

    model: str | None = None
    """The directory of the model."""

    seq_length: int | None = None
    """The tokens per sequence of the first batch, or None if it is not a whole micro-batch of sequences."""
