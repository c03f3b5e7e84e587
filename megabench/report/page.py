"""Rendering of the report page: collect the template's data and return the page as HTML text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from megabench import __version__
from megabench.doctor import Finding
from megabench.record import LinkBandwidth, RunRecord
from megabench.report import side_by_side
from megabench.report.charts import charts_of
from megabench.report.explanations import (
    command_on_real_hosts,
    explain_engine,
    explain_layout,
    layers_left_out,
    train_command,
    why,
)
from megabench.report.placement_drawing import draw_hosts, group_lines, hosts_left_out
from megabench.report.precision_charts import precision_charts
from megabench.report.sorted_table import heads_of, row_of
from megabench.report.trials import Shown, StudyView, WorkClassOfTrials
from megabench.study.bf16_reference import classes_compared_with_bf16
from megabench.study.results_directory import StudyRecords
from megabench.study.verdict import STATUS_WORDS, count_ends, ends, headline, particulars


@dataclass(frozen=True)
class Answer:
    """A work class with its verdict as text and the command of its best trial."""

    group: WorkClassOfTrials
    headline: str
    particulars: Sequence[str]
    reasons: Sequence[str]
    layout: Sequence[tuple[str, str]]
    engine: str
    command: str
    command_on_real_hosts: str
    layers_left_out: tuple[int, int] | None


def render(study: StudyRecords, findings: Sequence[Finding], other: StudyRecords | None = None) -> str:
    """Return the whole page as self-contained HTML text."""
    environment = Environment(
        loader=PackageLoader("megabench.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    source = environment.loader
    assert source is not None
    view = StudyView(study)
    return environment.get_template("page.html.jinja").render(
        style=source.get_source(environment, "page.css")[0],
        script=source.get_source(environment, "page.js")[0],
        version=__version__,
        study=study,
        view=view,
        counts=count_ends([trial.row for trial in view.trials]),
        precisions=[(group, view.precisions[group.key]) for group in view.classes if group.key in view.precisions],
        precision_charts=precision_charts(view),
        answers=_answers(view),
        sections=[_section(group, number, view) for number, group in enumerate(view.classes)],
        findings=findings,
        kinds=_KINDS,
        status_words=STATUS_WORDS,
        lost=[trial for trial in view.trials if not trial.row.is_ok],
        warned=[trial for trial in view.trials if trial.row.warnings],
        places=[_place(trial, f"place{number}") for number, trial in enumerate(view.trials)],
        probed=[trial for trial in view.trials if trial.record.probes],
        kernels=_kernels(view),
        versions=_common([trial.record for trial in view.trials], "versions"),
        variables=_common([trial.record for trial in view.trials], "variables"),
        commands=[(trial, train_command(trial.record)) for trial in view.trials],
        beside=_beside(view, StudyView(other)) if other else None,
        facts=_facts(view),
    )


_KINDS = {
    "untrustworthy": "Do not trust",
    "preliminary": "Preliminary",
    "slow": "Slower than necessary",
    "note": "Note",
}


def _answers(view: StudyView) -> list[Answer]:
    """Return one answer per work class. The first answer also lists the trials without a result.

    Work classes that only show how far bf16 losses differ between seeds have no answer.
    """
    roles = classes_compared_with_bf16(view.study.records)
    groups = [group for group in view.classes if group.key and roles.get(group.key) != "seed"] or view.classes
    answers = [_answer(group, view, group.key in roles) for group in groups]
    lost = [trial.row for group in view.classes if group not in groups and not group.key for trial in group.trials]
    if lost:
        said = [*answers[0].particulars, f"These trials have no result and are not compared: {ends(lost)}."]
        answers[0] = replace(answers[0], particulars=said)
    return answers


def _answer(group: WorkClassOfTrials, view: StudyView, is_compared_with_bf16: bool) -> Answer:
    best, reference = group.best, group.reference
    return Answer(
        group=group,
        headline=headline(group.decision, view.device, is_compared_with_bf16),
        particulars=particulars(group.decision, view.device),
        reasons=_reasons(group, best, reference, view),
        layout=explain_layout(best.record, view.device) if best else [],
        engine=explain_engine(best.record) if best else "",
        command=train_command(best.record) if best else "",
        command_on_real_hosts=command_on_real_hosts(best.record) if best else "",
        layers_left_out=layers_left_out(best.record) if best else None,
    )


def _reasons(group: WorkClassOfTrials, best: Shown | None, reference: Shown | None, view: StudyView) -> list[str]:
    """Explain why the best trial is faster than the reference, or than the second trial if the reference is best."""
    others = [trial for trial in group.trials if trial.row.is_ok and trial is not best]
    against = reference if reference is not best else next(iter(others), None)
    return why(best.record, against.record, view.device) if best and against else []


def _section(group: WorkClassOfTrials, number: int, view: StudyView) -> dict[str, Any]:
    charts = charts_of(group, f"class{number}", view.device)
    heads = heads_of(group, view)
    rows = [row_of(trial, heads) for trial in group.trials]
    return {"group": group, "charts": charts, "heads": heads, "rows": rows, "id": f"table{number}"}


def _place(trial: Shown, slug: str) -> dict[str, Any]:
    record = trial.record
    link = record.link_bandwidth
    return {
        "trial": trial,
        "hosts": draw_hosts(slug, record),
        "left_out": hosts_left_out(record),
        "groups": group_lines(record),
        "policy": record.placement.policy if record.placement else None,
        "bandwidth": link and _bandwidth(link),
    }


def _bandwidth(link: LinkBandwidth) -> str:
    all_rings = link.all_rings_gb_per_s  # older records do not contain this measurement
    return (
        "Bandwidth between hosts, measured at the start of the run: "
        f"{link.send_recv_gb_per_s:.1f} GB/s from one rank to a rank on the next host, "
        + (f"{all_rings:.1f} GB/s from all ranks of a host at once, each in a separate ring, " if all_rings else "")
        + f"{link.all_gather_gb_per_s:.1f} GB/s in an all-gather over all ranks."
    )


def _kernels(view: StudyView) -> dict[str, list[tuple[str, list[Shown]]]]:
    """Return, for each operation, the kernels and the trials that used each kernel."""
    used: dict[str, dict[str, list[Shown]]] = {}
    for trial in view.trials:
        for operation, kernel in (trial.record.kernels or {}).items():
            used.setdefault(operation, {}).setdefault(kernel, []).append(trial)
    return {operation: list(kernels.items()) for operation, kernels in used.items()}


def _common(records: Sequence[RunRecord], what: str) -> dict[str, list[tuple[str | None, list[str]]]]:
    """Return, for each version or variable name, the values and the trials with each value."""
    known = [record for record in records if record.environment]
    names = sorted({name for record in known if record.environment for name in getattr(record.environment, what)})
    found: dict[str, list[tuple[str | None, list[str]]]] = {}
    for name in names:
        by_value: dict[str | None, list[str]] = {}
        for record in known:
            by_value.setdefault(getattr(record.environment, what).get(name), []).append(record.trial)
        found[name] = list(by_value.items())
    return found


def _facts(view: StudyView) -> list[tuple[str, str]]:
    """Return the main facts of the study: machine, model, precision, batch, timed steps and trials."""
    records = view.study.records
    first = next((record for record in records if record.work_class), records[0])
    models = dict.fromkeys(
        f"{record.model}"
        + (f", {record.work_class.num_layers} layers" if record.work_class else "")
        + (f", {record.num_parameters / 1e9:.3g} B parameters" if record.num_parameters > 1e7 else "")
        for record in records
        if record.work_class or not first.work_class
    )
    precisions = dict.fromkeys(f"{record.precision}, gradients {record.grad_dtype}" for record in records)
    batches = dict.fromkeys(
        f"{record.global_batch} sequences of {record.seq_length:,} = {record.global_batch * record.seq_length:,} tokens"
        for record in records
    )
    steps = dict.fromkeys(f"{record.num_steps - record.warmup_steps}" for record in records if record.work_class)
    facts = [
        ("Machine", view.machine),
        ("Model", "; ".join(models)),
        ("Precision", "; ".join(precisions)),
        ("A step", "; ".join(batches)),
        ("Timed steps", ", ".join(steps) or "none"),
        ("Trials", count_ends([trial.row for trial in view.trials])),
    ]
    return facts


def _beside(first: StudyView, second: StudyView) -> dict[str, Any]:
    names = (first.study.name, second.study.name)
    if names[0] == names[1]:
        names = (f"{names[0]} (first)", f"{names[1]} (second)")
    pairs = side_by_side.pairs_of(first, second)
    return {
        "names": names,
        "views": (first, second),
        "sentence": side_by_side.comparison(pairs, names),
        "headlines": [headline(view.classes[0].decision, view.device) for view in (first, second)],
        "pairs": pairs,
        "picture": side_by_side.draw_pairs("beside", pairs, names, first.device),
        "settings": side_by_side.settings_that_differ(first, second),
    }
