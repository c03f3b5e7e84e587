"""Small checkpoints, one an engine, and the losses of the run that wrote them.

`python -m tests.golden.checkpoints` writes new ones. Every version that reads this schema of manifests must load the
ones in the repository.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from megabench.checkpoint.directory import folder_of
from tests import distributed
from tests.engines.cases import cases
from tests.engines.equivalence import resolve
from tests.engines.test_resume import whole_run

FOLDER = Path("tests/golden/checkpoints")
MODEL = FOLDER / "model"
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
ENGINES: dict[str, dict[str, Any]] = cases("SAVED")


def write(name: str) -> None:
    """The checkpoint behind step 6 of a run of 12 steps, and the losses of them all."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = resolve(WORLD_SIZE, **WORK | ENGINES[name], save=folder, save_every=6)
    losses = distributed.run(whole_run, WORLD_SIZE, run)[0]
    shutil.rmtree(folder_of(folder, 12))
    (folder / "losses.json").write_text(json.dumps(losses) + "\n")


if __name__ == "__main__":
    from transformers import LlamaConfig

    from tests.models.tiny import save_config

    if not MODEL.exists():
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        save_config(MODEL, LlamaConfig(**sizes, **heads, tie_word_embeddings=False, dtype="float32"))
    for name in ENGINES:
        write(name)
