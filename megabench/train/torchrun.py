"""torchrun, for `megabench train`: without a report, and with status 2, if the ranks refused the run."""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except ChildFailedError as error:
        if error.get_first_failure()[1].exitcode == 2:
            sys.exit(2)  # a rank has printed the reason
        raise
