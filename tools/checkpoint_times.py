"""What checkpoints cost: `python tools/checkpoint_times.py --out DIR -- --model llama3-8b …` (flags of pretrain).

Trains three short runs on this machine: one that stops training for each save, one that does not, and one that loads
what the second saved. A table of their records tells times and bandwidths; the last save of a run, which nothing runs
beside, is left out. The directory needs room for two checkpoints: 12 bytes a parameter each, with Adam.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from megabench import UserError
from megabench.record import RunRecord, SaveTimes

ROOT = Path(__file__).resolve().parents[1]


def main(
    flags: Annotated[list[str], typer.Argument(metavar="-- FLAGS...", help="Flags of launch/pretrain.py.")],
    out: Annotated[Path, typer.Option(help="Directory for checkpoints and records, on the disk to be measured.")],
    nproc: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    every: Annotated[int, typer.Option(min=1, help="Steps between two saves: enough to write one.")] = 20,
    saves: Annotated[int, typer.Option(min=1, help="Saves that are measured, of each kind.")] = 2,
) -> None:
    """Measure the time of saving and loading checkpoints."""
    try:
        steps = every * (saves + 1)
        sync = _train(out / "sync", nproc, [*flags, *_saving(out / "sync", "sync", every, steps)])
        shutil.rmtree(out / "sync" / "checkpoints")  # free space for the next two
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
        raise UserError(f"this run failed, see above: {' '.join(command)}")
    return RunRecord.read(folder / "record.json")


def table(sync: RunRecord, beside: RunRecord, loaded: RunRecord) -> str:
    """Return the measurements as a Markdown table, with the medians of all saves."""
    load = loaded.load
    assert load is not None
    rows = [_save_row("save, training stopped", sync.saves[:-1]), _save_row("save, beside training", beside.saves[:-1])]
    checked = load.num_bytes / 1e9 / load.check_seconds
    rows.append(f"| check before loading | {load.num_bytes / 1e9:.3g} | {load.check_seconds:.3g} | {checked:.3g} | - |")
    rows.append(
        f"| load | {load.num_bytes / 1e9:.3g} | {load.load_seconds:.3g} | {load.gb_per_second:.3g} | - |",
    )
    ratio = _median(beside.saves[:-1], "stall_seconds") / _median(sync.saves[:-1], "stall_seconds")
    head = "| | GB | s | GB/s | training waited s |\n| --- | --- | --- | --- | --- |"
    return "\n".join([head, *rows, f"\nBeside training a save stalls it {ratio:.3g} × as long as stopping it does."])


def _save_row(what: str, saves: list[SaveTimes]) -> str:
    gigabytes, seconds, stall = saves[0].num_bytes / 1e9, _median(saves, "seconds"), _median(saves, "stall_seconds")
    return f"| {what} | {gigabytes:.3g} | {seconds:.3g} | {gigabytes / seconds:.3g} | {stall:.3g} |"


def _median(saves: list[SaveTimes], name: str) -> float:
    values = sorted(getattr(save, name) for save in saves)
    return float(values[len(values) // 2])


if __name__ == "__main__":
    typer.run(main)
