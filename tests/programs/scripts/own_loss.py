"""A script whose Trainer computes another loss."""

from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class Doubled(Trainer):
    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(model, inputs, *args, **kwargs)


if __name__ == "__main__":
    import sys

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    Doubled(model=model, args=TrainingArguments(output_dir="out"), train_dataset=[{"input_ids": [1]}]).train()
