"""Readies megatron-core before it is first imported."""

import warnings

from megabench.runtime import megatron_cpu


def prepare() -> None:
    """Makes megatron-core work on this machine, with or without GPUs, and keep quiet about what is as intended.

    It must run before anything imports megatron.core, in the thread that trains.
    """
    for message in (
        "Transformer Engine and Apex are not installed",
        "Apex is not installed",
        "The .grad attribute of a Tensor that is not a leaf",  # its schedules look at the gradients of stage outputs
    ):
        warnings.filterwarnings("ignore", message=message)
    megatron_cpu.install()
