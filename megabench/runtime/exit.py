"""Exit a process while other threads may still run."""

import atexit
import contextlib
import os
import sys
from typing import NoReturn


def exit_process(status: int) -> NoReturn:
    """Ends this process with `status`: exit functions are called and output is written, the interpreter stays whole.

    Gloo's threads outlive `destroy_process_group` where anything still refers to a group, and megatron-core does. One
    that waits for the interpreter to let go of a tensor, when that is taken down, makes PyTorch abort the process
    (https://github.com/pytorch/pytorch/issues/190489): a run that is done would end with a launcher's error.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it is gone
            stream.flush()
    os._exit(status)
