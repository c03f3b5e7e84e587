"""The training command, which parses flags, trains, and exits with a status.

0: trained; 2: a setting or an input is invalid (one error message, before any process group exists); 1: any other
failure.
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from megabench.errors import UserError
from megabench.hardware.facts import visible_gpus
from megabench.runtime.child import die_with_parent
from megabench.runtime.emulated_network import check_emulated_host
from megabench.runtime.launcher import check_launcher
from megabench.runtime.process import set_up_process
from megabench.train.exits import Exits
from megabench.train.flags import parse_flags

if TYPE_CHECKING:
    from megabench.train.trainer import Find


def main(find: "Find | None" = None, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the training that `arguments` describe (by default those of this process), and exit with its status.

    Settings that are "auto" are refused unless `find` is given.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    exits = Exits()
    # a supervisor sends SIGUSR2 to make a hanging run print its stack
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=False)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # torchrun cannot end its processes if it is killed with SIGKILL
    try:
        set_up_process(arguments)
        given = parse_flags(arguments)
        if given is not None:
            if given.emulate_network:
                check_emulated_host()
            check_launcher(0 if given.device == "cpu" else len(visible_gpus()), arguments)
    except UserError as error:
        exits.refuse(str(error))
    if given is None:
        exits.finish()
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # hide the GPUs, because libraries would use them
    try:
        from megabench.train.trainer import Trainer  # loads torch, so only after the flags are read
    except KeyboardInterrupt:
        exits.interrupt()
    except Exception as error:
        exits.fail(error)
    Trainer(given, exits, find, arguments).train()
