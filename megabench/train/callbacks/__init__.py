"""Callbacks observe a run: hardware monitor, communication volume, profiler, and users' own."""

from megabench.train.callbacks.callback import Callback, Step, TrainerState

__all__ = ["Callback", "Step", "TrainerState"]
