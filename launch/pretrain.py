"""Train one model with one layout: `torchrun --nproc-per-node 8 launch/pretrain.py --tp 8`.

The same command as `torchrun … -m megabench.train`, for a checkout that is not installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import megabench from this checkout

from megabench.train.__main__ import main

if __name__ == "__main__":
    main()
