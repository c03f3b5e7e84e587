"""A callback that makes a run slow, so that it leaves the processor to the other processes of a test."""

import time

from megabench.train.callbacks import Callback
from megabench.train.callbacks.callback import Step


class Pause(Callback):
    def on_step_end(self, step: Step) -> None:
        time.sleep(1)
