"""Train one model with one layout: `torchrun --nproc-per-node 8 launch/pretrain.py --tp 8`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import megabench from this checkout

from megabench.config import RunConfig
from megabench.record import Probe
from megabench.train.main import main

if TYPE_CHECKING:
    from megabench.runtime.rendezvous import Rendezvous


def find(given: RunConfig, rendezvous: "Rendezvous", device: Literal["cpu", "cuda"]) -> tuple[RunConfig, list[Probe]]:
    # import torch only after the flags are read, so that --help is fast
    from megabench.autotune.tune_launched import tune_launched

    return tune_launched(given, rendezvous, device)


if __name__ == "__main__":
    main(find)
