"""Measure checkpoint times: `python tools/checkpoint_times.py --out DIR -- --model llama3-8b …` (flags of pretrain).

The tool trains three short runs on this machine. The first run saves synchronously, the second run saves
asynchronously, and the third run loads the last checkpoint of the second run. The tool prints a table of times and
bandwidths. The table omits the last save of each run, because no training overlaps the last save. The directory needs
space for two checkpoints of 12 bytes per parameter each, with Adam.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from megabench.errors import UserError
from megabench.record import RunRecord, SaveTimes

ROOT = Path(__file__).resolve().parents[1]


def main(
    flags: Annotated[list[str], typer.Argument(metavar="-- FLAGS...", help="Flags of launch/pretrain.py.")],
    out: Annotated[Path, typer.Option(help="Directory for checkpoints and records, on the disk to measure.")],
    nproc: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    every: Annotated[int, typer.Option(min=1, help="Steps between two saves, enough to finish a save.")] = 20,
    saves: Annotated[int, typer.Option(min=1, help="Number of measured saves per save mode.")] = 2,
) -> None:
    """Measure the time to save and to load checkpoints."""
    try:
        steps = every * (saves + 1)
        sync = _train(out / "sync", nproc, [*flags, *_saving(out / "sync", "sync", every, steps)])
        shutil.rmtree(out / "sync" / "checkpoints")  # free disk space for the next two checkpoints
        beside = _train(out / "async", nproc, [*flags, *_saving(out / "async", "async", every, steps)])
        last = ["--steps", str(steps + 1), "--load", str(out / "async" / "checkpoints")]
        loaded = _train(out / "load", nproc, [*flags, *last])
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(table(sync, beside, loaded))


def _saving(folder: Path, mode: str, every: int, steps: int) -> list[str]:
    words = [
        "--save",
        folder / "checkpoints",
        "--save-mode",
        mode,
        "--save-every",
        every,
        "--keep",
        1,
        "--steps",
        steps,
    ]
    return [str(word) for word in words]


def _train(folder: Path, nproc: int, flags: list[str]) -> RunRecord:
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / "record.json").unlink(missing_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    command = [*launcher, str(ROOT / "launch" / "pretrain.py"), *flags, "--out", str(folder)]
    if subprocess.run(command, check=False).returncode:
        raise UserError(f"the training run failed (see the output above): {' '.join(command)}")
    return RunRecord.read(folder / "record.json")


def table(sync: RunRecord, beside: RunRecord, loaded: RunRecord) -> str:
    """Return a Markdown table of the measurements, with the median over the saves of each run."""
    load = loaded.load
    assert load is not None
    rows = [_save_row("synchronous save", sync.saves[:-1]), _save_row("asynchronous save", beside.saves[:-1])]
    checked = load.num_bytes / 1e9 / load.check_seconds
    rows.append(f"| verify before load | {load.num_bytes / 1e9:.3g} | {load.check_seconds:.3g} | {checked:.3g} | - |")
    rows.append(
        f"| load | {load.num_bytes / 1e9:.3g} | {load.load_seconds:.3g} | {load.gb_per_second:.3g} | - |",
    )
    ratio = _median(beside.saves[:-1], "stall_seconds") / _median(sync.saves[:-1], "stall_seconds")
    head = "| | GB | s | GB/s | training stall in s |\n| --- | --- | --- | --- | --- |"
    return "\n".join(
        [head, *rows, f"\nAn asynchronous save stalls training {ratio:.3g} × as long as a synchronous save."]
    )


def _save_row(what: str, saves: list[SaveTimes]) -> str:
    gigabytes, seconds, stall = saves[0].num_bytes / 1e9, _median(saves, "seconds"), _median(saves, "stall_seconds")
    return f"| {what} | {gigabytes:.3g} | {seconds:.3g} | {gigabytes / seconds:.3g} | {stall:.3g} |"


def _median(saves: list[SaveTimes], name: str) -> float:
    values = sorted(getattr(save, name) for save in saves)
    return float(values[len(values) // 2])


if __name__ == "__main__":
    typer.run(main)
