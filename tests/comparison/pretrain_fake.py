"""launch/pretrain.py with the fake trainer in the place of the one that is probed."""

import runpy
import sys

from megabench.autotune import tune_launched
from megabench.supervisor import coordinator

tune_launched.TRAINER = (sys.executable, "-m", "tests.comparison.fake_trainer")
coordinator.LOST_AFTER_SECONDS = 8.0

if __name__ == "__main__":
    runpy.run_path("launch/pretrain.py", run_name="__main__")
