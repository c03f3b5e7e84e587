"""Trains one model under one layout: `torchrun --nproc-per-node 8 launch/pretrain.py --tp 8`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout works without an install

from megabench.train.command import main

if __name__ == "__main__":
    main()
