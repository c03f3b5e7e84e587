"""The compare command with the fake trainer in the trainer's place."""

import sys

from megabench import cli
from megabench.comparison import runner
from megabench.supervisor import coordinator, trial_process

runner.run_here.__defaults__ = runner.run_launched.__defaults__ = (
    (sys.executable, "-m", "tests.comparison.fake_trainer"),
)
coordinator.LOST_AFTER_SECONDS = 8.0
coordinator.ANSWER_SECONDS = trial_process.ANSWER_SECONDS = 12.0

if __name__ == "__main__":
    sys.argv.insert(1, "compare")
    cli.main()
