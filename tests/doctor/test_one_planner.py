"""The doctor and the plan never contradict each other: studies are drawn at random, and both are asked about them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megabench.cost.job import Candidate
from megabench.cost.profile import Profile
from megabench.doctor import Finding, plan_rules, predicted_trials
from megabench.doctor.examine import examine
from megabench.doctor.finding import Case
from megabench.doctor.predicted_trials import PredictedTrial
from megabench.errors import UserError
from megabench.planner import make_plan as planning
from megabench.planner import search
from megabench.planner.costs import Costs, Estimate
from megabench.planner.engines.registry import PLANNED_ENGINES
from megabench.planner.search import Plan, candidates, settings_of
from megabench.precision import POLICIES
from tests.doctor.drawn_studies import DrawnStudy, draw

NUM_STUDIES = 200
_PREDICTED = re.compile(r"predicted for (\S+) and micro-batch (\d+): [^;]*? ([\d.e+]+) s per step(, [\d.]+ × as fast)?")


@dataclass(frozen=True)
class Answers:
    """What the doctor says about a study, and what it predicts for each trial.

    `advice` are the findings of predictions before those of several trials are merged.
    """

    findings: list[Finding]
    advice: list[Finding]
    predicted: dict[str, PredictedTrial]

    def about(self, trial: str, words: str) -> list[Finding]:
        return [finding for finding in self.findings if trial in finding.trials and words in finding.what]


@pytest.fixture(autouse=True)
def _shared_plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a plan only once for the same job, topology and profile, whoever asks for it."""
    plans: dict[object, Plan | UserError] = {}

    def plan(job: Any, topology: Any, profile: Profile, keep: int = 12) -> Plan:
        key = job, topology, profile.model_dump_json(), keep
        if key not in plans:
            try:
                plans[key] = search.plan(job, topology, profile, keep)
            except UserError as error:
                plans[key] = error
        found = plans[key]
        if isinstance(found, Plan):
            return found
        raise found

    monkeypatch.setattr(predicted_trials, "plan", plan)
    monkeypatch.setattr(planning, "plan", plan)
    yield


def ask_doctor(study: DrawnStudy, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    path = folder / "study.yaml"
    trials = [{"name": f"trial-{number}", **trial} for number, trial in enumerate(study.trials)]
    path.write_text(yaml.safe_dump({"base": study.base, "trials": trials, "repeats": 3}))
    predicted: dict[str, PredictedTrial] = {}

    def kept(trial: Any, predictions: Any) -> PredictedTrial | None:
        found = predicted_trials.predict(trial, predictions)
        if found:
            predicted[found.name] = found
        return found

    with monkeypatch.context() as patched:
        patched.setattr(plan_rules, "predict", kept)
        records, reference, rules, unbeaten = plan_rules.plan(path, None, study.cluster)
    case = Case(tuple(records), reference, frozenset(unbeaten))
    advice = [finding for rule in rules for finding in rule(case)]
    return Answers(examine(records, reference, rules, unbeaten), advice, predicted)


def ask_plan(study: DrawnStudy, **changes: Any) -> Plan | None:
    """The plan for the work of a study, as the command line asks for it, or None if nothing can be planned."""
    work = study.base | changes
    arguments = (work["model"], study.cluster, work["seq_length"], work["global_batch"], work.get("num_layers"))
    given = {name: work[name] for name in ("precision", "fp8_recipe", "optimizer") if name in work}
    try:
        return planning.make_plan(*arguments, work["grad_dtype"], None, 12, None, **given)
    except UserError:
        return None


class Check:
    """The answers to one study, and what must hold for them."""

    def __init__(self, study: DrawnStudy, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.study, self.folder, self.monkeypatch = study, folder, monkeypatch
        self.plan = ask_plan(study)
        self.doctor = ask_doctor(study, folder, monkeypatch)
        self.candidates = _candidates(self.plan) if self.plan else {}

    def equal_predictions(self) -> int:
        """Each trial that is a candidate has the same time, memory and chance in both. Return their number."""
        compared = 0
        for trial in self.doctor.predicted.values():
            here = trial.estimate.candidate
            if self.plan is None or not self._is_planned(here):
                assert not _must_be_planned(trial), here.name
            if self.plan is None or trial.job.stack.keeps_gathered or not self._is_planned(here):
                continue
            planned = _estimate(self.plan, self.candidates[here.name])
            assert planned.step_seconds == trial.estimate.step_seconds, here.name
            assert planned.memory == trial.estimate.memory and planned.fit_chance == trial.estimate.fit_chance
            assert bool(self.doctor.about(trial.name, "run out of GPU memory")) != planned.fits, here.name
            compared += 1
        return compared

    def misfits_are_not_among_the_fitting(self) -> int:
        """Return the number of trials that are reported as not fitting."""
        shown: set[str] = set()
        if self.plan:
            shown = {one.candidate.name for one in [*self.plan.ranked, *self.plan.baselines]}
            shown |= {name for same in self.plan.merged.values() for name in same}
        found = [finding for finding in self.doctor.findings if "run out of GPU memory" in finding.what]
        reported = [trial for finding in found for trial in finding.trials]
        for trial in reported:
            predicted = self.doctor.predicted[trial]
            assert not predicted.estimate.fits
            if not predicted.job.stack.keeps_gathered:
                assert predicted.estimate.candidate.name not in shown
        certain = [trial for finding in found if finding.kind == "fails" for trial in finding.trials]
        assert all(self.doctor.predicted[trial].estimate.fit_chance < 0.5 for trial in certain)
        assert not certain or self.doctor.findings[0].kind == "fails"
        return len(reported)

    def recommendations_are_those_of_the_plan(self) -> int:
        """Every layout that the doctor recommends has the time of the plan. Return the number of recommendations."""
        number = 0
        for finding in self.doctor.advice:
            if "the plan" in finding.change or "the plan" in finding.what:
                assert self.plan and self.plan.ranked
                best = self.plan.ranked[0]
                said = finding.evidence + finding.change
                assert best.candidate.name in said and f"{best.step_seconds:.3g} s per step" in said
                for settings in set(re.findall(r"\{.*?\}", finding.change)):
                    assert self._trained_by(yaml.safe_load(settings)).estimate.candidate == best.candidate
                number += 1
            elif "predicted" in finding.what and (found := _PREDICTED.findall(finding.evidence)):
                number += self._faster_settings(finding, found)
            elif "is not needed" in finding.what:
                number += self._needless_sharding(finding)
        return number

    def _trained_by(self, settings: dict[str, Any]) -> PredictedTrial:
        """The prediction for a study of one trial with these settings, which the doctor does not report as bad."""
        alone = ask_doctor(replace(self.study, trials=[settings]), self.folder, self.monkeypatch)
        (trial,) = alone.predicted.values()
        for finding in alone.findings:
            # another precision is other work, and one pod per server is another cluster
            is_of_other_plans = "fp32" in finding.what + finding.evidence or "(pods) of one server" in finding.what
            assert finding.kind not in ("fails", "slow") or is_of_other_plans, (settings, finding)
            assert "run out of GPU memory" not in finding.what, (settings, finding)
        return trial

    def the_first_of_the_plan_is_good(self) -> bool:
        """The doctor reports the plan's first layout neither as beaten nor as not fitting."""
        if self.plan is None or not self.plan.ranked:
            return False
        best = self.plan.ranked[0]
        assert self._trained_by(settings_of(best.candidate)).estimate == best
        return True

    def a_misfit_of_the_plan_is_reported(self) -> bool:
        """The doctor reports the layout that, according to the plan, lacks the least memory."""
        if self.plan is None or not self.plan.misfits:
            return False
        misfit = self.plan.misfits[0]
        alone = ask_doctor(replace(self.study, trials=[settings_of(misfit.candidate)]), self.folder, self.monkeypatch)
        (trial,) = alone.predicted.values()
        (finding,) = alone.about(trial.name, "run out of GPU memory")
        assert trial.estimate == misfit and finding.kind == ("fails" if misfit.fit_chance < 0.5 else "note")
        return True

    def _faster_settings(self, finding: Finding, found: list[tuple[str, str, str, str]]) -> int:
        """Compare the recommended precision and micro-batch with the plan for this precision."""
        (name,) = finding.trials
        here = self.doctor.predicted[name]
        for precision, micro_batch, seconds, is_recommended in found:
            candidate = replace(here.estimate.candidate, micro_batch=int(micro_batch), is_compiled=False)
            if is_recommended and not here.job.stack.keeps_gathered and self._is_planned(here.estimate.candidate):
                plan = ask_plan(self.study, precision=precision)
                assert plan, finding
                known = self.candidates if plan is self.plan else _candidates(plan)
                assert candidate.name in known and _has(_estimate(plan, candidate), seconds), finding
        return len(found)

    def _is_planned(self, candidate: Candidate) -> bool:
        known = self.candidates.get(candidate.name)
        return known is not None and _is_same(candidate, known)

    def _needless_sharding(self, finding: Finding) -> int:
        """Compare the predicted step of DDP with the plan's."""
        (name,) = finding.trials
        here = self.doctor.predicted[name].estimate.candidate
        seconds = re.findall(r"predicted for DDP: [^;]*? ([\d.e+]+) s per step", finding.evidence)
        ddp = f"ddp·{here.layout} mb{here.micro_batch}{' full' if here.recompute == 'full' else ''}"
        assert self.plan and len(seconds) == 1, finding
        assert _has(_estimate(self.plan, self.candidates[ddp]), seconds[0]), finding
        return 1


def _candidates(plan: Plan) -> dict[str, Candidate]:
    return {candidate.name: candidate for candidate in candidates(plan.job, plan.topology)}


def _estimate(plan: Plan, candidate: Candidate) -> Estimate:
    """The prediction that `megabench plan --explain` shows."""
    return Costs(plan.job, plan.topology, plan.profile).estimate(candidate)


def _must_be_planned(trial: PredictedTrial) -> bool:
    """Whether a trial has only settings that plans vary."""
    options, layout = trial.trial.record.options, trial.estimate.candidate.layout
    if options.get("shard_size") or trial.estimate.candidate.placement != "topology" or layout.vp > 1:
        return False
    return options.get("offload", "none") == "none" or options.get("reshard_after_forward") is not False


def _has(estimate: Estimate, seconds: str) -> bool:
    return f"{estimate.step_seconds:.3g}" == seconds and estimate.fits


def _is_same(one: Candidate, other: Candidate) -> bool:
    return replace(one, is_compiled=False) == other


def check_studies(seeds: range, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Check the studies of all seeds, and return how often each check applied."""
    counts = dict.fromkeys(("equal", "misfits", "recommended", "first", "misfit of plan"), 0)
    for seed in seeds:
        study = draw(seed)
        try:
            check = Check(study, folder, monkeypatch)
            counts["equal"] += check.equal_predictions()
            counts["misfits"] += check.misfits_are_not_among_the_fitting()
            counts["recommended"] += check.recommendations_are_those_of_the_plan()
            counts["first"] += check.the_first_of_the_plan_is_good()
            counts["misfit of plan"] += check.a_misfit_of_the_plan_is_reported()
        except AssertionError as error:
            raise AssertionError(f"study {seed}: {study}: {error}") from error
    return counts


def test_the_doctor_and_the_plan_agree_on_200_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Takes about 20 s of CPU time, because each study needs a plan of all its candidates."""
    counts = check_studies(range(NUM_STUDIES), tmp_path, monkeypatch)
    assert all(count >= NUM_STUDIES // 8 for count in counts.values()), counts


def test_the_draw_covers_engines_precisions_and_sizes():
    studies = [draw(seed) for seed in range(NUM_STUDIES)]
    trials = [trial for study in studies for trial in study.trials]
    assert {trial["engine"] for trial in trials} == set(PLANNED_ENGINES)
    assert {study.base["precision"] for study in studies} == set(POLICIES)
    assert {trial["recompute"] for trial in trials} == {"none", "selective", "full"}
    assert len({study.base["model"] for study in studies}) > 10 and len({study.cluster for study in studies}) > 30
    assert {"auto", 1, 32} <= {trial["micro_batch"] for trial in trials}


@pytest.mark.exhaustive
def test_the_doctor_and_the_plan_agree_on_many_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check_studies(range(NUM_STUDIES, 1000), tmp_path, monkeypatch)
