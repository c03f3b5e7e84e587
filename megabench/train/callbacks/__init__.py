"""Callbacks observe a run: hardware monitor, communication volume, profiler, and users' own."""

from megabench.train.callbacks.callback import Callback, Step, TrainerState
from megabench.train.callbacks.tensor_sketches import TensorSketches

__all__ = ["Callback", "Step", "TensorSketches", "TrainerState"]
