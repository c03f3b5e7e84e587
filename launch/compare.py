"""Run a study on the processes that torchrun started. Run the same command on every node of a cluster:

torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
    launch/compare.py configs/studies/quickstart.yaml --out runs/quickstart

The same command as `megabench compare`, for a checkout that is not installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import megabench from this checkout

from megabench.cli import main

if __name__ == "__main__":
    main("compare")
