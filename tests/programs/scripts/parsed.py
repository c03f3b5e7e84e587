"""A script whose arguments HfArgumentParser reads."""

from dataclasses import dataclass

import torch
from beside import LENGTH  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Arguments:
    model_name_or_path: str


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((LENGTH,), index), "labels": torch.full((LENGTH,), index)}


def main() -> None:
    mine, training = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained(mine.model_name_or_path)
    Trainer(model=model, args=training, train_dataset=Rows()).train()
    raise AssertionError("the script continues after Trainer.train")


if __name__ == "__main__":
    main()
