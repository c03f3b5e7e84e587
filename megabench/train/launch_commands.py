"""Commands that work, for the messages of runs that cannot start. Loads no torch."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megabench.config import RunConfig
from megabench.config.auto import resolve_first
from megabench.errors import UserError
from megabench.hardware.facts import visible_gpus
from megabench.parallel.layout import divisors

_GPUS_PER_HOST = 8  # of hosts that this machine does not tell about


def launch_commands(run: RunConfig, arguments: Sequence[str], world_size: int) -> str:
    """Return the torchrun commands that start enough processes for the layout of `run`.

    Return "" if `world_size` is enough, or if the run is invalid with any number of processes.
    """
    needed = run.tp * run.cp * run.pp
    if world_size >= needed:
        return ""
    gpus = visible_gpus()
    try:
        resolve_first(run, needed, "cuda" if gpus else "cpu")
    except UserError:
        return ""
    program = shlex.join([*(["-m", "megabench.train"] if _is_module() else [sys.argv[0]]), *arguments])
    most = len(gpus) or _GPUS_PER_HOST
    text = ""
    if needed <= most or not gpus:
        text += f"\nTo start {needed} processes on one machine:\n  torchrun --nproc-per-node {needed} {program}"
    if needed > most:
        per_host = divisors(needed, most)[-1]
        text += (
            f"\nTo start {needed} processes on {needed // per_host} hosts, on each host:\n  torchrun --nnodes "
            f"{needed // per_host} --nproc-per-node {per_host} --rdzv-backend c10d --rdzv-endpoint HOST:29500 {program}"
        )
    return text


def small_run_command() -> str:
    """Return the command of a run that fits on any machine."""
    program = "megabench train" if _is_module() else f"python {sys.argv[0]}"
    return f"\nTo try training on any machine:\n  {program} --model llama-tiny --steps 20"


def _is_module() -> bool:
    """Return whether this process was started as `megabench` or as a module, and not as a script of a checkout."""
    name = Path(sys.argv[0]).name
    return not name.endswith(".py") or name == "__main__.py"
