"""Prepare megatron-core before it is first imported."""

import warnings

from megabench.runtime import megatron_cpu


def prepare() -> None:
    """Make megatron-core work on this machine, with or without GPUs, and silence its expected warnings.

    Call `prepare` before anything imports megatron.core, in the thread that trains.
    """
    for message in (
        "Transformer Engine and Apex are not installed",
        "Apex is not installed",
        "The .grad attribute of a Tensor that is not a leaf",  # the schedules read .grad of stage outputs
    ):
        warnings.filterwarnings("ignore", message=message)
    megatron_cpu.install()
