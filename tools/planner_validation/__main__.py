"""Fit the cost profiles and validate predictions on held-out runs: `make validate-planner`."""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from megabench.cost.profile import read_profile
from megabench.errors import UserError
from tools.planner_validation.collectives import read_collectives
from tools.planner_validation.draw import draw
from tools.planner_validation.internevo import read_internevo, without_facts
from tools.planner_validation.own import is_disturbed, read_own
from tools.planner_validation.profiles import (
    Measurements,
    fitted_profiles,
    for_own_engines,
    is_memory_fitted,
    is_own_fitted,
    published_profiles,
    write_profiles,
)
from tools.planner_validation.published import DATA, Row, check_sources, read_rows
from tools.planner_validation.report import check_against, docs_table, lines, measured_profile, null_model, table
from tools.planner_validation.sources import SWEEP
from tools.planner_validation.tested_nodes import on_healthy_nodes, read_tested

RUNS, INTERNEVO, TESTED = "published-runs.csv.xz", "internevo-7b.csv.xz", "published-runs-with-nccl-tests.csv.xz"
_BENCHMARKS = Path("benchmarks")
_KEPT = _BENCHMARKS / "planner" / "validation.md"
_DOCS = Path("docs") / "planning.md"
_IN_DOCS = "<!-- validation: begin -->", "<!-- validation: end -->"
_PICTURE = Path("docs") / "pictures" / "planner-validation.svg"
# studies that measured the time of Python code and of the engines' hooks, which are constants of the cost model
_HOST_TIMES_FROM = ("gpt2-zero", "host-time")
_INTRODUCTION = """# How good the planner is

`make validate-planner DATA=…` (tools/planner_validation/) generates this file.

- **Fitted rows.** Constants are fitted only to the rows marked "fitted". The allocator shares are also fitted to the
  peak memory of the rows marked "memory fitted", and all other lines omit that memory.
- **Null model.** "Constant MFU" predicts each row with the median MFU of the fitted rows of the same GPU type.
- **Fitted to the other sources.** In the last lines, a source's rows are predicted with constants that are fitted
  without any of its rows.
- **Measured networks.** The playbook sweep's runs with NCCL tests, and the runs of measured-network, are predicted with
  collectives that were measured on their own hosts. "On a healthy network" predicts them with the shipped constants.
- **Healthy nodes.** A run's nodes are healthy if each of their NCCL tests reaches at least half of the 95th percentile
  of the tests on equally many nodes.
- **Copies per replica.** The time of the sweep's copies per replica is fitted to its runs on healthy nodes, on 128 and
  more GPUs (NOTES.md).
- **Best in first two** counts the sweeps in which the fastest measured layout is one of the two predicted fastest.
- **Omitted rows.** torchtitan's and PyTorch FSDP's rows with "selective" recomputation are omitted, because these
  programs recompute whole layers, and their number is not stated. Runs on GPUs without a profile are omitted.
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
- **Disturbed studies.** In engines-4-gpus, a fault switched torch.compile off.
- **Host times.** The time of Python code and of the engines' hooks is from gpt2-zero and host-time, in which the host
  limits the step.
- **Own records.** options-4-gpus is fitted and engines-bf16 is held out. Before the H200 was calibrated, with older
  records, engines-bf16 was fitted and options-4-gpus was held out.

"""


def validate(
    data: Annotated[Path, typer.Argument(help="Folder of published runs and collectives.")] = DATA,
    write: Annotated[
        bool, typer.Option("--write", help="Replace the shipped profiles with the fitted profiles.")
    ] = False,
    accept_worse: Annotated[
        bool,
        typer.Option("--accept-worse", help="Keep results whose mean error is more than 2 points higher for a source."),
    ] = False,
) -> None:
    """Fit the profiles, and report the accuracy of predictions for fitted and held-out runs."""
    published = read_rows(data / RUNS)
    check_sources(published, data)
    measured = Measurements(
        published=published,
        collectives=read_collectives(data),
        own=read_own(_BENCHMARKS),
        calibrated=read_profile(_BENCHMARKS / "calibrate-h200" / "two-gpus.json"),
        attention=read_profile(_BENCHMARKS / "calibrate-h200" / "attention-and-fp8.json"),
        nvlink=read_profile(_BENCHMARKS / "calibrate-h200" / "four-gpus.json"),
        h100=read_profile(_BENCHMARKS / "calibrate-h100" / "two-gpus.json"),
    )
    profiles = fitted_profiles(measured)
    null = null_model(
        [*(row for row in published if row.is_fit), *(row for row in measured.own if is_own_fitted(row))], profiles
    )
    internevo = read_internevo(data / INTERNEVO)
    tested = read_tested(data / TESTED)
    parts = _published_parts(published) + _by_source([*internevo, *without_facts(internevo)]) + _tested_parts(tested)
    own_profiles = for_own_engines(profiles, measured.h100)
    found = [line for name, rows in parts for line in lines(name, rows, profiles, null)]
    found += [line for name, rows in _own_parts(measured.own) for line in lines(name, rows, own_profiles, null)]
    for source in sorted({row.source.name for row in published if row.is_fit}):
        others = replace(measured, published=[row for row in published if row.source.name != source])
        held = [row for row in published if row.is_fit and row.source.name == source]
        name = f"{source}, one host, if constants are fitted to the other sources only"
        found += lines(name, held, published_profiles(others), null)[:1]
    text = _INTRODUCTION + table(found) + "\n"
    print(text)
    if not accept_worse:
        check_against(_KEPT.read_text(), found)
    _KEPT.parent.mkdir(exist_ok=True)
    _KEPT.write_text(text)
    begin, end = _IN_DOCS
    written = f"{begin}\n\n{docs_table(found)}\n{end}"
    _DOCS.write_text(re.sub(f"{begin}.*{end}", lambda _: written, _DOCS.read_text(), flags=re.DOTALL))
    once = [row for row in published if row.source is not SWEEP or row.is_fit]
    own = [replace(row, is_fit=is_own_fitted(row) or row.source.name in _HOST_TIMES_FROM) for row in measured.own]
    drawn = [(row, measured_profile(row, profiles)) for row in (*once, *internevo, *tested)]
    draw(drawn + [(row, measured_profile(row, own_profiles)) for row in own], _PICTURE)
    if write:
        write_profiles(own_profiles)


Parts = list[tuple[str, Sequence[Row]]]  # for each line of the table, its name and the runs that it scores


def _by_source(rows: Sequence[Row]) -> Parts:
    """Return a line for each source, and for its runs in fp8."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        name = row.source.name + (", fp8" if row.job.precision == "fp8" else "") + (" (fitted)" if row.is_fit else "")
        found.setdefault(name, []).append(row)
    return list(found.items())


def _published_parts(published: Sequence[Row]) -> Parts:
    """Return the lines of the published runs. The playbook sweep has more lines, by number of GPUs and by layout."""
    found = _by_source([row for row in published if row.source is not SWEEP])
    sweep = [row for row in published if row.source is SWEEP]
    for size in sorted({row.topology.world_size for row in sweep}):
        rows = [row for row in sweep if row.topology.world_size == size]
        found.append((f"{SWEEP.name}, {size} GPUs{' (fitted)' * rows[0].is_fit}", rows))
    many = [row for row in sweep if not row.is_fit]
    if many:
        found.append((f"{SWEEP.name}, 16 and 64 GPUs", many))
        found += [(f"{SWEEP.name}, {what}", members) for what, members in _by_pipeline(many)]
    return found


def _tested_parts(tested: Sequence[Row]) -> Parts:
    """Return the lines of those runs of the sweep whose nodes were measured with NCCL's tests."""
    found: Parts = []
    for size in sorted({row.topology.world_size for row in tested}):
        rows = [row for row in tested if row.topology.world_size == size]
        name = f"{SWEEP.name}, {size} GPUs, with its NCCL tests"
        found.append((name, rows))
        found += [(f"{name}, {what}", part) for what, part in _by_pipeline(rows)]
        found.append((f"{SWEEP.name}, {size} GPUs, on healthy nodes", on_healthy_nodes(rows)))
    return found


def _own_parts(own: Sequence[Row]) -> Parts:
    """Return the lines of this project's records: the fitted studies, all others by number of hosts, and each study."""
    found: Parts = [("own records, 4 layers (fitted)", [row for row in own if is_own_fitted(row)])]
    for name in _HOST_TIMES_FROM:
        if rows := [row for row in own if row.source.name == name]:
            found.append((f"own records, {name} (host times are from it)", rows))
    others = [row for row in own if not is_own_fitted(row) and row.source.name not in _HOST_TIMES_FROM]
    groups: dict[str, list[Row]] = {}
    for row in others:
        where = "emulated hosts" if len(row.topology.hosts) > 1 else "one host"
        kept = _without_memory(row) if is_memory_fitted(row) else row
        groups.setdefault(f"{where}, {row.topology.hosts[0].device.split()[1]}", []).append(kept)
    for where, rows in sorted(groups.items(), reverse=True):
        found.append((f"own records, all others on {where}", rows))
        if any(map(is_disturbed, rows)):
            rest = [row for row in rows if not is_disturbed(row)]
            found.append((f"own records, all others on {where}, without disturbed studies", rest))
    for name in dict.fromkeys(row.source.name for row in others):
        rows = [row for row in others if row.source.name == name]
        found.append((f"own records, {name}{' (memory fitted)' * is_memory_fitted(rows[0])}", rows))
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
