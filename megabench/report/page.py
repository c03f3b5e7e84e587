"""Rendering of the report page: collect the template's data and return the page as HTML text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from megabench import __version__
from megabench.doctor import Finding
from megabench.record import LinkBandwidth, RunRecord
from megabench.report import side_by_side
from megabench.report.charts import charts_of, speed_chart
from megabench.report.crossover_chart import crossover_chart
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
from megabench.report.trials import Shown, StudyView, WorkClassOfTrials
from megabench.study.answers import answer
from megabench.study.bf16_reference import classes_compared_with_bf16
from megabench.study.results_directory import StudyRecords
from megabench.study.verdict import STATUS_WORDS, count_ends, headline


@dataclass(frozen=True)
class Winner:
    """The fastest trial of a work class: why it is fastest, what its layout does, and its command."""

    group: WorkClassOfTrials
    best: Shown
    headline: str
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
    columns = view.table.choose(["all"])
    usual = view.table.choose()
    return environment.get_template("page.html.jinja").render(
        style=source.get_source(environment, "page.css")[0],
        script=source.get_source(environment, "page.js")[0],
        version=__version__,
        study=study,
        view=view,
        counts=count_ends([trial.row for trial in view.trials]),
        answer=answer(study.records, study.reference, study.answers, study.budget, study.confirm),
        columns=columns,
        num_more=len(columns) - len(usual),
        usual={column.key for column in usual},
        by_trial={trial.name: trial for trial in view.trials},
        has_fp8=any(record.precision == "fp8" for record in study.records),
        crossover_chart=crossover_chart(view),
        speed_chart=speed_chart(view),
        precision_charts=precision_charts(view),
        winners=_winners(view),
        sections=[(g, charts_of(g, f"class{number}", view.device)) for number, g in enumerate(view.classes)],
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


def _winners(view: StudyView) -> list[Winner]:
    """Return the fastest trial of each work class, except classes that only show how far losses differ by chance."""
    roles = classes_compared_with_bf16(view.study.records)
    groups = [group for group in view.classes if roles.get(group.key or "") != "seed"]
    return [
        Winner(
            group=group,
            best=best,
            headline=headline(group.decision, view.device, group.key in roles),
            reasons=_reasons(group, best, group.reference, view),
            layout=explain_layout(best.record, view.device),
            engine=explain_engine(best.record),
            command=train_command(best.record),
            command_on_real_hosts=command_on_real_hosts(best.record),
            layers_left_out=layers_left_out(best.record),
        )
        for group in groups
        if (best := group.best)
    ]


def _reasons(group: WorkClassOfTrials, best: Shown, reference: Shown | None, view: StudyView) -> list[str]:
    """Explain why the best trial is faster than the reference, or than the second trial if the reference is best."""
    others = [trial for trial in group.trials if trial.row.is_ok and trial is not best]
    against = reference if reference is not best else next(iter(others), None)
    return why(best.record, against.record, view.device) if against else []


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
        "network": record.emulated_network and record.emulated_network.sentence,
    }


def _bandwidth(link: LinkBandwidth) -> str:
    all_rings = link.all_rings_gb_per_s
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
    if days := sorted({record.ended_at[:10] for record in records if record.ended_at}):
        facts.append(("Measured", " to ".join(dict.fromkeys((days[0], days[-1])))))
    if commits := dict.fromkeys(r.environment.commit for r in records if r.environment and r.environment.commit):
        facts.append(("megabench commit", ", ".join(commits)))
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
