"""Which trials a round of --confirm contains, and when no round follows, without processes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megabench.comparison.confirm import Confirmation
from megabench.record import RunRecord
from megabench.study.parity import judge_parity
from tests.study.records import make_record, work_class

CLOSE, ALSO_CLOSE = [1000.0, 1012.0, 1001.0], [1009.0, 1000.0, 1010.0]


def runs(name: str, speeds: list[float], **fields: Any) -> list[RunRecord]:
    return [make_record([6.0], speed, trial=name, repeat=number, **fields) for number, speed in enumerate(speeds)]


def confirmation(*trials: list[RunRecord], only: str = "", minutes: float = 1e4, **results: Any) -> Confirmation:
    records = judge_parity([record for its in trials for record in its], trials[0][0].trial)
    fields: dict[str, Any] = {"records": records, "study": SimpleNamespace(reference=records[0].trial)}
    stub: Any = SimpleNamespace(**fields, **{"not_written": None, "found": lambda trial: None} | results)
    names = [only] if only else list(dict.fromkeys(record.trial for record in records))
    chosen: list[Any] = [SimpleNamespace(name=name, config=SimpleNamespace(auto_settings=())) for name in names]
    return Confirmation(stub, chosen, minutes)


def first_round(confirming: Confirmation) -> list[tuple[str, int]]:
    return [(attempt.trial.name, attempt.repeat) for attempt in next(confirming.rounds(), [])]


def test_a_round_has_the_undecided_trials_and_the_reference():
    trials = [runs("zero3", [600, 601, 602]), runs("dp", CLOSE), runs("tp", ALSO_CLOSE), runs("pp", [700, 701, 702])]
    assert first_round(confirmation(*trials)) == [("zero3", 3), ("dp", 3), ("tp", 3)]
    assert first_round(confirmation(*trials[1:])) == [("dp", 3), ("tp", 3)], "the reference is one of them"


def test_trials_with_fewer_runs_catch_up_in_common_rounds():
    """A trial without the second and the third round is compared in new rounds, which all of them have."""
    confirming = confirmation(runs("zero3", [600, 601, 602]), runs("dp", [1000, 1001, 1002]), runs("pp", [700]))
    assert first_round(confirming) == [("zero3", 3), ("dp", 3), ("pp", 3)]


def test_confirmed_rankings_need_no_round():
    confirming = confirmation(runs("zero3", [600, 601, 602]), runs("dp", [1000, 1001, 1002]))
    assert first_round(confirming) == [] and confirming.outcome == "the first place is confirmed"


def test_each_work_class_has_a_ranking_of_its_own():
    other = {"work_class": work_class(seed=2)}
    trials = [runs("zero3", [600, 601, 602]), runs("dp", [1000, 1001, 1002])]
    trials += [runs("a", CLOSE, **other), runs("b", ALSO_CLOSE, **other)]
    alone = runs("alone", [500], work_class=work_class(seed=3))
    assert first_round(confirmation(*trials, alone)) == [("a", 3), ("b", 3), ("alone", 3)]


def test_ten_runs_are_enough():
    ten = [runs("dp", (CLOSE * 4)[:10]), runs("tp", (ALSO_CLOSE * 4)[:10])]
    confirming = confirmation(*ten)
    assert first_round(confirming) == []
    assert confirming.outcome == "the trials whose order is not confirmed ran 10 times"
    confirming = confirmation(ten[0], ten[1][:9])
    assert first_round(confirming) == [], "the other one alone decides nothing"


def test_trials_that_are_not_selected_do_not_run():
    trials = [runs("zero3", [600]), runs("dp", [1000])]
    assert first_round(confirmation(*trials, only="dp")) == [("dp", 1)]


def test_a_failed_trial_does_not_run_again():
    broken = make_record([], trial="pp", status="oom", error="no memory", work_class=None)
    assert first_round(confirmation(runs("zero3", [600]), runs("dp", [1000]), [broken])) == [("zero3", 1), ("dp", 1)]
    alone = confirmation([broken])
    assert first_round(alone) == [] and alone.outcome == "no trial has a result"


def test_a_round_starts_only_if_it_fits():
    """The records say that a run takes 100 s; a measured time counts before that."""
    trials = [runs("zero3", [600], wall_seconds=100.0), runs("dp", [1000], wall_seconds=100.0)]
    assert first_round(confirmation(*trials, minutes=3.4))
    late = confirmation(*trials, minutes=3.3)
    assert first_round(late) == []
    assert late.outcome == "the next round (zero3 and dp) does not fit into --max-minutes"
    for name in ("zero3", "dp"):
        attempt: Any = SimpleNamespace(trial=late._trials[name])
        with late.timed(attempt):
            pass
    assert first_round(late), "they take no time"


def test_a_run_with_short_runs_does_not_predict_the_next_one():
    confirming = confirmation(runs("dp", [1000], wall_seconds=100.0), minutes=1.0)
    trial: Any = SimpleNamespace(name="dp", config=SimpleNamespace(auto_settings=("micro_batch",)))
    attempt: Any = SimpleNamespace(trial=trial)
    with confirming.timed(attempt):
        pass
    assert first_round(confirming) == [], "the time of the record counts"


def test_a_full_disk_ends_it():
    confirming = confirmation(runs("zero3", [600]), runs("dp", [1000]), not_written=f"{Path('results')} is full")
    assert first_round(confirming) == [] and "could not be written" in confirming.outcome
