"""Answer the question of a study in sentences. Does not import torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from megabench.optim.optimizers import title_of
from megabench.record import RunRecord
from megabench.study.crossover import Crossover
from megabench.study.crossover_answer import AnswerTable, crossover_headline, crossover_particulars, crossover_tables
from megabench.study.precision_verdict import precision_verdicts
from megabench.study.program_answers import program_sentences
from megabench.study.study import Question
from megabench.study.summary import Budget, Row, class_titles, layout_name, reference_name, runs_by_trial, summarize
from megabench.study.sweep import is_sweep, setup_name, sweep_sentences, unless_repeated
from megabench.study.verdict import (
    Decision,
    by_place,
    confirmation,
    decide,
    device_word,
    devices_word,
    ends,
    headline,
    listed,
    particulars,
    speeds_by_trial,
)

_MOST_NAMED = 4  # a sentence with more trials is hard to read


@dataclass(frozen=True)
class Answer:
    """The answer to a study's question as one headline, what else a reader should know, a sentence each, and tables."""

    headline: str
    particulars: tuple[str, ...]
    tables: tuple[AnswerTable, ...] = ()


@dataclass(frozen=True)
class _Results:
    """The rows and records of a study."""

    records: Sequence[RunRecord]
    reference: str
    budget: Budget
    rows: Sequence[Row]
    confirm: str | None

    @property
    def good(self) -> list[Row]:
        """The trials with a result, fastest first."""
        good = [row for row in self.rows if row.is_ok and row.tokens_per_second_per_device]
        return sorted(good, key=lambda row: row.speed, reverse=True)

    @property
    def lost(self) -> list[Row]:
        return [row for row in self.rows if not row.is_ok]

    @property
    def device(self) -> str:
        return device_word(self.records)

    @property
    def devices(self) -> str:
        return devices_word(self.device)

    @property
    def decisions(self) -> dict[str | None, Decision]:
        """The conclusion about each work class, that of the reference first."""
        speeds, head = speeds_by_trial(self.records), reference_name(self.records, self.reference)
        by_class = groupby(self.rows, key=lambda row: row.work_class)
        return {key: decide(list(rows), speeds, head) for key, rows in by_class if key}


def answer(
    records: Sequence[RunRecord],
    reference: str,
    question: Question | None = None,
    budget: Budget | None = None,
    confirm: str | None = None,
) -> Answer:
    """Return the answer to `question`, or to the question that the trials ask if None (see `question_of`).

    `confirm` is a sentence that says how to confirm a ranking. It follows a ranking that is not confirmed.
    """
    is_run = len(records) == 1 and records[0].trial_id is None  # a run of megabench train
    if question is None and is_run and records[0].status == "ok":
        return _single_run(records[0])
    results = _Results(records, reference, budget or Budget(), summarize(records, reference), confirm)
    if not results.good:
        return Answer(f"No trial has a result that counts: {ends(results.lost)}.", ())
    found = _ANSWERS[question or question_of(records, results.rows)](results)
    return replace(found, particulars=(*found.particulars, *program_sentences(results.good, records)))


def _single_run(record: RunRecord) -> Answer:
    """Say what a single run has reached: its losses, its speed, its time and its newest checkpoint."""
    device, losses = device_word([record]), [loss for loss in record.losses if loss is not None]
    last_step = record.first_step + len(record.losses) - 1
    steps = f"in steps {record.first_step} to {last_step}" if record.first_step > 1 else f"in {last_step} steps"
    speed = "no throughput, because all steps are warm-up"
    if record.step_seconds and record.tokens_per_second_per_device:
        speed = (
            f"{record.step_seconds.median:.3g} s a step, {record.tokens_per_second_per_device:,.0f} tok/s per {device}"
        )
    if record.mfu:
        speed += f", {record.mfu:.1%} MFU"
    changed = f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f}" if losses else "no loss was finite"
    said = []
    if record.wall_seconds:
        said.append(f"The run took {record.wall_seconds / 3600:.2g} hours and ended at {record.ended_at}.")
    if saved := [save.step for save in record.saves if not save.error]:
        said.append(f"Its newest checkpoint is that of step {max(saved)}.")
    if record.stopped_by:
        said.append(f"It was stopped by {record.stopped_by}.")
    where = f"{layout_name(record)} on {record.world_size} × {record.device}"
    return Answer(f"{record.model}, {where}: {changed} {steps}; {speed}.", tuple(said))


def question_of(records: Sequence[RunRecord], rows: Sequence[Row]) -> Question:
    """Return the question that the trials of a study ask.

    Speeds of CPU processes answer no question, so trials on CPUs ask for parity. Trials on several numbers of devices
    ask for scaling. If most trials repeat an engine and layout with another micro-batch or precision, they ask what
    these bring, unless the study compares fp8 with bf16. All other studies ask for the fastest trial.
    """
    good = [row for row in rows if row.is_ok]
    if device_word(records) == "process":
        return "parity"
    if len({row.world_size for row in good}) > 1:
        return "scaling"
    has_fp8 = any(row.precision == "fp8" for row in good)
    return "sweep" if not has_fp8 and is_sweep(good, records) else "fastest"


def _fastest(results: _Results) -> Answer:
    """Name the fastest trial of the reference's work class, and of every other class in a sentence each."""
    records, device, decisions = results.records, results.device, results.decisions
    titles = class_titles(records)
    precisions = precision_verdicts(decisions, records, device)
    first = next(iter(decisions.values()))
    if precisions:
        verdict = next(iter(precisions.values()))
        return Answer(verdict.headline, (*_how_to_confirm(results), *verdict.particulars, *_said_of_lost(results)))
    others = [
        f"{titles[key]}: {headline(decision, device)}"
        for key, decision in decisions.items()
        if decision is not first and decision.best
    ]
    unplaced = [row for row in results.lost if row.work_class is None]
    if len(decisions) == 1:
        first = replace(first, bad=(*first.bad, *unplaced))
    elif unplaced:
        others.append(f"These trials have no result and are not compared: {ends(unplaced)}.")
    return Answer(headline(first, device), (*_how_to_confirm(results), *particulars(first, device), *others))


def _parity(results: _Results) -> Answer:
    """Say whether all trials reach the losses of the reference of their work class."""
    diverged = [row for row in results.rows if row.status == "diverged" or row.parity == "diverged"]
    lost = [row for row in results.lost if row not in diverged]
    by_class: dict[str | None, list[Row]] = {}
    for row in results.rows:
        if row not in lost:
            by_class.setdefault(row.work_class, []).append(row)
    comparisons = [rows for rows in by_class.values() if len(rows) > 1 or rows[0].num_runs > 1]
    compared = [row for rows in comparisons for row in rows]
    alone = [rows[0].trial for rows in by_class.values() if rows not in comparisons]
    place = f", within each of the {len(comparisons)} workloads" if len(comparisons) > 1 else ""
    differences = [row.max_relative_difference for row in compared if row.max_relative_difference is not None]
    figure = f" (relative differences up to {max(differences):.1g})" if differences else ""
    said = [f"Not compared: {ends(lost)}."] if lost else []
    if alone:
        said.append(f"No other trial did the same work as {listed(alone)}.")
    if diverged:
        names = listed([row.trial for row in diverged])
        return Answer(f"No: {names} did not do the same work as the reference {results.reference}.", tuple(said))
    if not compared:
        return Answer("Not known: fewer than two trials with equal work have a result.", tuple(said))
    if tensors := _tensors_compared(compared):
        said.append(tensors)
    every = "all" if len(compared) == len(results.rows) else f"{len(compared)} of"
    return Answer(f"Yes: {every} {len(results.rows)} trials reach the same losses{place}{figure}.", tuple(said))


def _tensors_compared(rows: Sequence[Row]) -> str | None:
    """Say how far the gradients, weights and moments of single tensors differ, if they were compared."""
    rows = [row for row in rows if row.trial != row.reference]
    compared = [row for row in rows if row.num_tensors_compared]
    if not compared:
        return None
    num_tensors = min(row.num_tensors_compared or 0 for row in compared)
    part = max(row.tensor_difference_in_tolerances or 0.0 for row in compared)
    return (
        f"{len(compared)} of {len(rows)} trials were compared with the reference tensor by tensor: the first "
        f"gradients, updates and second moments of {num_tensors} tensors differ by up to {part:.2g} of their tolerance."
    )


def _days(results: _Results) -> Answer:
    """Give the days of a whole training run, the reference first, and the price if it is known."""
    budget = results.budget
    good = [row for row in results.good if budget.days(row)]
    if not good:
        return Answer("Not known: no trial measured its throughput.", _said_of_lost(results))
    ordered = sorted(good, key=lambda row: (row.trial != results.reference, budget.days(row) or 0.0))
    names, shown = _names(results), ordered[:_MOST_NAMED]
    places = {(row.world_size, row.device) for row in good}

    def place(row: Row, is_first: bool) -> str:
        return f" on {row.world_size} × {row.device}" if is_first or len(places) > 1 else ""

    first, *others = [
        f"{budget.days(row):,.1f}{f' days for {budget.words}' if row is shown[0] else ''}"
        f"{place(row, row is shown[0])} with {names[row.trial]}"
        for row in shown
    ]
    said = []
    if budget.price_per_gpu_hour:
        costs = listed([f"{budget.cost(row):,.0f} with {names[row.trial]}" for row in shown])
        said.append(f"At {budget.price_per_gpu_hour:,.2f} per {results.device} and hour, the run costs {costs}.")
    said.append("The days are those of an uninterrupted run at the measured throughput, without saves.")
    if len({row.work_class for row in good}) > 1:
        said.append("The trials do different work, e.g. with different optimizers, so only throughput is compared.")
    return Answer(f"{', '.join([first, *others])}.", (*said, *_said_of_lost(results)))


def _scaling(results: _Results) -> Answer:
    """Compare the throughput per device on the most devices with that of the fastest trial on the fewest."""
    first = next((row for row in results.good if row.trial == results.reference), results.good[0])
    good = [row for row in results.good if _tokens_alike(row) == _tokens_alike(first)]
    fewest, most = min(row.world_size for row in good), max(row.world_size for row in good)
    if fewest == most:
        return _fastest(results)
    base = next(row for row in good if row.world_size == fewest)
    largest = [row for row in good if row.world_size == most]
    kept = [f"{row.trial} {row.speed / base.speed:.0%}" for row in largest[:_MOST_NAMED]]
    said = [
        f"Of the {base.speed:,.0f} tokens/s per {results.device} of {base.trial} on {fewest} "
        f"{results.devices if fewest > 1 else results.device}, the fastest trials on {most} keep: {', '.join(kept)}."
    ]
    for decision in results.decisions.values():
        said += by_place(decision, results.device)
    return Answer(
        f"From {fewest} to {most} {results.devices}, {largest[0].trial} keeps {largest[0].speed / base.speed:.0%} of "
        f"the throughput per {results.device}.",
        (*dict.fromkeys(said), *_said_of_lost(results)),
    )


def _tokens_alike(row: Row) -> tuple[str, str, int]:
    """Return what decides how much work a token is. Only trials that agree in it scale from one to the other."""
    return row.model, row.precision, row.seq_length


def _memory(results: _Results) -> Answer:
    """Name the trial with the least peak memory, beside the reference and the fastest trial."""
    measured = [row for row in results.good if row.peak_memory_gib]
    if not measured:
        return Answer("No trial measured its memory.", _said_of_lost(results))
    least = min(measured, key=_memory_of)
    reference = next((row for row in measured if row.trial == results.reference), None)
    beside = ""
    if reference and reference is not least:
        ratio = _memory_of(least) / _memory_of(reference)
        beside = f", {ratio:.2f} × the {_memory_of(reference):.1f} GiB of {reference.trial}"
    first = f"{least.trial} needs the least memory: {_memory_of(least):.1f} GiB per {results.device}{beside}."
    fastest = measured[0]
    said = [
        f"The fastest trial, {fastest.trial}, needs {_memory_of(fastest):.1f} GiB and reaches "
        f"{fastest.speed / least.speed:.2f} × the throughput of {least.trial}."
    ]
    return Answer(first, (*(said if fastest is not least else []), *_said_of_lost(results)))


def _sweep(results: _Results) -> Answer:
    """Compare the engines and layouts at equal settings, and say what each varied setting brings."""
    said = [*sweep_sentences(results.good, results.records, results.reference), *_said_of_lost(results)]
    fastest = results.good[0]
    said.append(f"{fastest.trial} has the highest throughput: {fastest.speed:,.0f} tokens/s per {results.device}.")
    if len(results.good) > 1:
        said.append(confirmation(results.good, speeds_by_trial(results.records)))
        said += _how_to_confirm(results)
    return Answer(said[0], tuple(said[1:]))


def _crossover(results: _Results) -> Answer:
    """Say on which networks layouts are faster than ZeRO-3, with tables of the points and of the planner's errors."""
    found = Crossover(results.rows, results.records)
    said = (*crossover_particulars(found), *_said_of_lost(results))
    return Answer(crossover_headline(found), said, crossover_tables(found))


def _names(results: _Results) -> dict[str, str]:
    """Return the name of each trial in a sentence: "ZeRO-3" or "DDP and Adafactor", unless several have that name."""
    first = {trial: runs[0] for trial, runs in runs_by_trial(results.records).items()}
    names = {
        trial: setup_name(record) + f" and {title_of(record.optimizer)}" * (record.optimizer != "adamw")
        for trial, record in first.items()
    }
    return unless_repeated(names, lambda trial: trial)


def _how_to_confirm(results: _Results) -> tuple[str, ...]:
    """Say how to confirm the rankings of the work classes, if one of them is not confirmed."""
    is_open = any(decision.others and decision.undecided for decision in results.decisions.values())
    return (results.confirm,) if results.confirm and is_open else ()


def _said_of_lost(results: _Results) -> tuple[str, ...]:
    return (f"Without a result: {ends(results.lost)}.",) if results.lost else ()


def _memory_of(row: Row) -> float:
    assert row.peak_memory_gib is not None
    return row.peak_memory_gib


_ANSWERS: Mapping[str, Callable[[_Results], Answer]] = {
    "fastest": _fastest,
    "parity": _parity,
    "days": _days,
    "scaling": _scaling,
    "memory": _memory,
    "sweep": _sweep,
    "crossover": _crossover,
}
