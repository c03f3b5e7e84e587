"""`make validate-planner DATA=published-runs.csv`: fits, tries on what was not fitted, prints and keeps the table."""

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
_HOOKS_FROM = "gpt2-zero"  # constants of megabench/specs/data_parallel_cost.py
_INTRODUCTION = """# How good the planner is

Written by `make validate-planner DATA=…` (tools/planner_validation/). Constants were fitted to the rows called
"fitted" and to no others, but for the allocator's shares, which were fitted to the memory of those called "memory
fitted" as well; that memory is in no other line. "Constant MFU" is a null model that gives every row of a GPU the
median MFU of its fitted rows. Spearman is over all rows of a line, "within a sweep" the mean over groups of one model,
batch and number of GPUs; regret is how much longer the predicted best of such a group (of what is predicted to fit)
takes than the measured best; where the null model cannot tell, it draws. OOM: published ends that are not told apart
from crashes; layouts that the sweep's program refuses count as foretold. Its memory is that of the first rank, with its
program's own share for the allocator (shipped profiles: that of megabench's engines). The memory of FSDP2, and of DDP
with several micro-batches, from when they held gradients twice is in no line. playbook-sweep.md, beside this
file, says what is known of the sweep's rows that no layout explains; they are in every figure here. Of own records
options-4-gpus is fitted and engines-bf16 is not; it was the other way round, with older records, until the H200 had
been calibrated.

"""


def validate(
    data: Annotated[Path, typer.Argument(help="The table of published runs; that of collectives lies beside it.")],
    write: Annotated[bool, typer.Option("--write", help="Make the fitted profiles the shipped ones.")] = False,
) -> None:
    """Fit the profiles, and measure their accuracy on measurements that were not used for fitting."""
    measured = Measurements(
        published=read_rows(data),
        collectives=read_collectives(data.with_name("published-collectives.csv")),
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
    """What gets a line of its own: each source's fitted rows, and its others; a large sweep by its number of GPUs."""
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
    """Multi-node rows with tensor-parallel groups in a pipeline, and all others: the former ran in another way."""
    both = [row for row in rows if row.candidate.layout.pp > 1 and row.candidate.layout.tp > 1]
    return [("of these TP × PP", both), ("of these not TP × PP", [row for row in rows if row not in both])]


if __name__ == "__main__":
    try:
        typer.run(validate)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
