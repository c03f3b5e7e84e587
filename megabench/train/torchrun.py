"""torchrun, for `megabench train`: one sentence if ranks fail, instead of torchrun's report and traceback."""

import logging
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as run_torchrun

from megabench.runtime.messages import LOST_CONNECTION
from megabench.runtime.process import killer_hint, signal_title


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with `arguments`. Return the exit status: 2 if the ranks refused the run, 1 after other failures."""
    logging.disable(logging.ERROR)  # of torchrun, not of its ranks
    try:
        run_torchrun(arguments)
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode == 2:
            return 2  # a rank has printed the reason
        if cause := root_cause(error.failures):
            print(f"Error: {cause}", file=sys.stderr)
        if command := resume_command(arguments):
            print(f"To resume from the newest checkpoint:\n  {command}", file=sys.stderr)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def root_cause(failures: Mapping[int, ProcessFailure]) -> str | None:
    """Return which rank failed and why, or None if a rank has already printed that.

    A rank that was killed is the cause of failures of other ranks, even if they were noticed first. A rank that lost
    its connection to another rank is not the cause.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, int]:
        return bool(LOST_CONNECTION.search(str(item[1].message))), item[1].timestamp

    in_order = sorted(failures.items(), key=order)
    for rank, failure in in_order:
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:  # torchrun ends the other ranks with SIGTERM
            return f"rank {rank} was killed by {signal_title(-failure.exitcode)}{killer_hint(-failure.exitcode)}"
    rank, failure = in_order[0]
    reported = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    if not isinstance(reported, dict):
        return f"rank {rank} ended with exit status {failure.exitcode}"
    return None if reported.get("extraInfo", {}).get("is_printed") else f"rank {rank} failed: {reported.get('message')}"


def resume_command(arguments: Sequence[str]) -> str | None:
    """Return the command that resumes the run, or None if the run has saved no checkpoint."""
    # imported only after a failure, so that torchrun starts without them
    from megabench.checkpoint.directory import steps_in
    from megabench.train.flags import parse_flags

    own = list(arguments[arguments.index("megabench.train") + 1 :])
    run = parse_flags(own)
    if run is None or run.save is None or not steps_in(run.save):
        return None
    num_processes = arguments[arguments.index("--nproc-per-node") + 1]
    load = [] if run.load else ["--load", str(run.save)]
    return shlex.join(["megabench", "train", "--nproc", num_processes, *own, *load])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
