"""A small checkpoint, and the losses of the run that wrote it.

`python -m tests.golden.checkpoints` writes a new one. Every version that reads this schema of manifests must load the
one in the repository. The engines store the same tensors under the same names. They differ only in the bounds of their
slices, and tensor parallelism slices both dimensions.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from megabench.checkpoint.directory import folder_of
from tests import distributed
from tests.engines.equivalence import resolve
from tests.engines.test_resume import whole_run

CHECKPOINTS = Path("tests/golden/checkpoints")
MODEL = CHECKPOINTS / "model"
FOLDER = CHECKPOINTS / "megatron"
WORLD_SIZE = 2
WORK: dict[str, Any] = {
    "model": str(MODEL),
    "num_layers": None,
    "seq_length": 16,
    "global_batch": 4,
    "micro_batch": 1,
    "optimizer": "adamw",
    "lr": 1e-3,
    "eps": 1e-8,
    "steps": 12,
    "data": "synthetic",
}


def write() -> None:
    """The checkpoint behind step 6 of a run of 12 steps under TP2, and the losses of them all."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    run = resolve(WORLD_SIZE, **WORK, tp=2, save=FOLDER, save_every=6)
    losses = distributed.run(whole_run, WORLD_SIZE, run)[0]
    shutil.rmtree(folder_of(FOLDER, 12))
    (FOLDER / "losses.json").write_text(json.dumps(losses) + "\n")


if __name__ == "__main__":
    from transformers import LlamaConfig

    from tests.models.tiny import save_config

    if not MODEL.exists():
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        save_config(MODEL, LlamaConfig(**sizes, **heads, tie_word_embeddings=False, dtype="float32"))
    write()
