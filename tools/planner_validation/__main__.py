"""Fit the cost profiles and validate predictions on held-out runs: `make validate-planner DATA=published-runs.csv`."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megabench import UserError
from megabench.cost.profile import read_profile
from tools.planner_validation.collectives import read_collectives
from tools.planner_validation.own import read_own
from tools.planner_validation.profiles import (
    Measurements,
    fitted_profiles,
    is_memory_fitted,
    is_own_fitted,
    write_profiles,
)
from tools.planner_validation.published import Row, read_rows
from tools.planner_validation.report import lines, null_model, table

_BENCHMARKS = Path("benchmarks")
_KEPT = _BENCHMARKS / "planner" / "validation.md"
# the study from which megabench/specs/data_parallel_cost.py takes the cost of DeepSpeed's hooks
_HOOKS_FROM = "gpt2-zero"
_INTRODUCTION = """# How good the planner is

`make validate-planner DATA=…` (tools/planner_validation/) generates this file.

- **Fitted rows.** Constants are fitted only to the rows marked "fitted". The allocator shares are also fitted to the
  peak memory of the rows marked "memory fitted", and all other lines omit that memory.
- **Null model.** "Constant MFU" predicts each row with the median MFU of the fitted rows of the same GPU type.
- **Rank correlation.** "Spearman" is over all rows of a line. "Within a sweep" is the mean over groups of rows with the
  same model, batch and number of GPUs.
- **Regret** is how much longer a step of the predicted best layout takes than a step of the measured best layout, in
  each group. Only layouts that are predicted to fit can be the predicted best. Ties count with their mean regret.
- **OOM.** The published sources do not distinguish out-of-memory failures from crashes. Layouts that the sweep's
  program rejects count as predicted failures.
- **Memory of the playbook sweep** is that of rank 0, predicted with the allocator shares of the sweep's program. The
  shipped profiles have the allocator shares of megabench's engines.
- **Omitted memory.** Every line omits the memory of FSDP2, and of DDP with several micro-batches, in the studies in
  which these engines stored the gradients twice.
- **Outliers.** All figures include the rows of the sweep that no layout explains (see playbook-sweep.md).
- **Own records.** options-4-gpus is fitted and engines-bf16 is held out. Before the H200 was calibrated, with older
  records, engines-bf16 was fitted and options-4-gpus was held out.

"""


def validate(
    data: Annotated[
        Path, typer.Argument(help="CSV file of published runs, in a directory with the files of published collectives.")
    ],
    write: Annotated[
        bool, typer.Option("--write", help="Replace the shipped profiles with the fitted profiles.")
    ] = False,
) -> None:
    """Fit the profiles, and report the accuracy of predictions for fitted and held-out runs."""
    measured = Measurements(
        published=read_rows(data),
        collectives=read_collectives(data.parent),
        own=read_own(_BENCHMARKS),
        calibrated=read_profile(_BENCHMARKS / "calibrate-h200" / "two-gpus.json"),
        nvlink=read_profile(_BENCHMARKS / "calibrate-h200" / "four-gpus.json"),
    )
    profiles = fitted_profiles(measured)
    null = null_model(
        [*(row for row in measured.published if row.is_fit), *(row for row in measured.own if is_own_fitted(row))],
        profiles,
    )
    found = []
    for name, rows in _parts(measured):
        found += lines(name, rows, profiles, null)
    text = _INTRODUCTION + table(found) + "\n"
    print(text)
    _KEPT.parent.mkdir(exist_ok=True)
    _KEPT.write_text(text)
    if write:
        write_profiles(profiles)


def _parts(measured: Measurements) -> list[tuple[str, Sequence[Row]]]:
    """Return the name and the rows of each line of the table.

    Each source has one line for fitted rows and one line for held-out rows. The playbook sweep also has one line per
    number of GPUs.
    """
    found: list[tuple[str, Sequence[Row]]] = []
    for source in dict.fromkeys(row.source.name for row in measured.published):
        rows = [row for row in measured.published if row.source.name == source]
        for is_fit in (True, False):
            part = [row for row in rows if row.is_fit == is_fit]
            sizes = sorted({row.topology.world_size for row in part})
            if source == "playbook sweep":
                parts = [(f", {size} GPUs", [row for row in part if row.topology.world_size == size]) for size in sizes]
            else:
                parts = [("", part)]
            found += [(f"{source}{what}{' (fitted)' * is_fit}", members) for what, members in parts if members]
            if source == "playbook sweep" and not is_fit:
                found.append((f"{source}, all of these", part))
                found += [(f"{source}, {what}", members) for what, members in _by_pipeline(part)]
    fitted = [row for row in measured.own if is_own_fitted(row)]
    found.append(("own H200 records, 4 layers (fitted)", fitted))
    hooks = [row for row in measured.own if row.source.name == _HOOKS_FROM]
    found.append((f"own H200 records, {_HOOKS_FROM} (what DeepSpeed's hooks cost is from it)", hooks))
    others = [row for row in measured.own if not is_own_fitted(row) and row not in hooks]
    by_hosts: dict[str, list[Row]] = {"one host": [], "emulated hosts": []}
    for row in others:
        where = "emulated hosts" if len(row.topology.hosts) > 1 else "one host"
        by_hosts[where].append(_without_memory(row) if is_memory_fitted(row) else row)
    found += [(f"own H200 records, all others on {where}", rows) for where, rows in by_hosts.items()]
    for name in dict.fromkeys(row.source.name for row in others):
        rows = [row for row in others if row.source.name == name]
        found.append((f"own H200 records, {name}{' (memory fitted)' * is_memory_fitted(rows[0])}", rows))
    return found


def _without_memory(row: Row) -> Row:
    return replace(row, measured={kind: value for kind, value in row.measured.items() if kind != "memory_gib"})


def _by_pipeline(rows: Sequence[Row]) -> list[tuple[str, Sequence[Row]]]:
    """Split multi-node rows into rows that combine TP with PP and all other rows (see playbook-sweep.md)."""
    both = [row for row in rows if row.candidate.layout.pp > 1 and row.candidate.layout.tp > 1]
    return [("of these TP × PP", both), ("of these not TP × PP", [row for row in rows if row not in both])]


if __name__ == "__main__":
    try:
        typer.run(validate)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
