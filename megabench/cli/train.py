"""`megabench train`: check a run, and start torchrun with one process per rank on this machine."""

import os
import sys
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand
from typer.main import get_command

from megabench.config import RunConfig
from megabench.config.auto import resolve_first
from megabench.data.checks import check_before_start
from megabench.errors import UserError
from megabench.hardware.facts import visible_gpus
from megabench.parallel.layout import LayoutError
from megabench.runtime.emulated_network import check_emulated_host
from megabench.runtime.launcher import check_launcher, launcher_rank, refuse_num_processes
from megabench.study.compare_request import check_data
from megabench.train.flags import LAUNCH_OPTIONS, parse_flags, training_command
from megabench.train.launch_commands import launch_commands

# torchrun forwards these signals to the ranks: its own, and the warning of Slurm
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


class _TrainCommand(TyperCommand):
    """A command that leaves the settings of a run to `parse_flags`, which suggests near matches, and completes them."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        return [*params, *get_command(training_command({})).params] if ctx.resilient_parsing else params


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    cls=_TrainCommand,
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def train(
    context: typer.Context,
    nproc: Annotated[int | None, typer.Option(min=1, help=LAUNCH_OPTIONS["nproc"])] = None,
) -> None:
    """Train one model under one layout on the processes of this machine or of a launcher."""
    if launcher_rank() is not None:
        refuse_num_processes(nproc)
        from megabench.train.__main__ import main

        main(context.args)
    run = parse_flags(context.args, program="megabench train")
    if run is None:
        return
    if run.emulate_network:
        check_emulated_host()
    check_launcher(len(visible_gpus()), context.args)
    world_size = _check(run, context.args, nproc)
    words = ["-m", "megabench.train", *context.args]
    if world_size > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun sets this value, too, but with a warning
        launch = ["--standalone", "--nproc-per-node", str(world_size), "--signals-to-handle", _SIGNALS]
        words = ["-m", "megabench.train.torchrun", *launch, *words]
    os.execv(sys.executable, [sys.executable, *words])


def _check(run: RunConfig, arguments: list[str], num_processes: int | None) -> int:
    """Return the number of processes to start. Raises UserError if the run cannot start with them on this machine."""
    num_gpus = 0 if run.device == "cpu" else len(visible_gpus())
    if run.device == "cuda" and not num_gpus:
        raise UserError("device=cuda, but no NVIDIA GPU was found here. Use --device cpu or auto.")
    world_size = num_processes or num_gpus or run.tp * run.cp * run.pp
    if num_gpus and world_size > num_gpus:
        raise UserError(
            f"--nproc {world_size} exceeds this machine's {num_gpus} GPUs. Use --nproc {num_gpus}, or --device cpu."
        )
    device: Literal["cpu", "cuda"] = "cuda" if num_gpus else "cpu"
    try:
        resolved = resolve_first(run, world_size, device)
    except LayoutError as error:
        raise LayoutError(f"{error}.{launch_commands(run, arguments, world_size)}") from None
    check_data("megabench train", run.data)
    if world_size > 1:  # a single process refuses by itself
        check_before_start(resolved)
    if world_size > 1 and device == "cpu" and not run.skip_memory_check:
        from megabench.train.memory_check import check_memory

        check_memory(resolved, run, 0, world_size)  # before each process imports torch
    return world_size
