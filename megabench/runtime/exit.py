"""Exit from a process whose other threads may still run."""

import atexit
import contextlib
import os
import signal
import sys
from typing import NoReturn


def exit_on_sigterm() -> None:
    """Exit normally after SIGTERM, so that temporary files are removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def exit_process(status: int) -> NoReturn:
    """End this process with `status`: call atexit functions and flush output, but skip the interpreter's shutdown.

    Gloo threads outlive `destroy_process_group` while anything refers to a group, and megatron-core keeps references.
    If such a thread frees a tensor during interpreter shutdown, PyTorch aborts the process
    (https://github.com/pytorch/pytorch/issues/190489). The launcher would then report a finished run as failed.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the process that reads the pipe may have exited
            stream.flush()
    os._exit(status)
