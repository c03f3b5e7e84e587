"""The `megabench` command. Commands import what they need when they run, so that --help stays instant."""

import os
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from megabench import UserError

# the command line's own errors; typer does not export their base
_UsageError = cast(type[Exception], typer.BadParameter.__base__)

app = typer.Typer(
    help="Which parallel layout trains fastest on this cluster, and by how much does it beat pure ZeRO-3?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _megabench() -> None:
    """Keeps `compare` a subcommand: a Typer app of one command would take its place."""


@app.command()
def compare(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study to run.")],
    out: Annotated[Path, typer.Option(help="Folder for records, table, logs and TensorBoard scalars.")],
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes [default: the GPUs here, else the study's world_size].")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Run only what has no good record yet.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run these trials only: a name or a pattern; repeatable.")
    ] = None,
) -> None:
    """Run the trials of a study, each in fresh processes, and rank them against ZeRO-3.

    On one machine: megabench compare STUDY.yaml --out DIR. On several, the same on every node:
    torchrun --nnodes N --nproc-per-node G … launch/compare.py STUDY.yaml --out DIR.
    Exit status: 0 when every trial is ok, 1 when one is not, 2 when the study cannot be run.
    """
    from megabench.study.request import Request

    request = Request(study, out, resume, tuple(only or ()))
    if _launcher_rank() is not None:
        if nproc:
            raise UserError("--nproc is for one machine without torchrun; here use torchrun's --nproc-per-node")
        from megabench.study.runner import run_launched

        sys.exit(run_launched(request))
    planned, num_processes = request.plan_here(nproc)
    from megabench.study.runner import run_here

    sys.exit(run_here(request, planned, num_processes))


def _launcher_rank() -> int | None:
    """This process's rank under torchrun, or another launcher that sets its variables; None without one."""
    launched = all(variable in os.environ for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return int(os.environ["RANK"]) if launched else None


def main() -> None:
    """Runs the command line; a UserError becomes one sentence on stderr and exit status 2.

    Under a launcher all ranks read the same words, so the first alone says what is wrong with them.
    """
    speaks = _launcher_rank() in (None, 0)
    try:
        app(standalone_mode=speaks)
    except UserError as error:
        if speaks:
            print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    except _UsageError:
        sys.exit(2)


if __name__ == "__main__":
    main()
