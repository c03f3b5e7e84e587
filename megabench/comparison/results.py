"""The results of a study on disk: its records, and the files generated from them."""

import json
import os
import platform
import re
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megabench.config.auto import AutoSetting, apply_setting
from megabench.config.record_fields import auto_fields, requested_fields
from megabench.doctor import examine
from megabench.hardware.facts import gpu_names
from megabench.inputs import read_text
from megabench.record import Probe, RecordError, RunRecord, TensorParity, read_records, write_records
from megabench.report import write_report
from megabench.runtime import environment
from megabench.runtime.run_lock import RunLock, RunLockedError, check_free
from megabench.study.masking import without_secrets
from megabench.study.parity import Key, judge_parity, key_of, standards_of
from megabench.study.results_directory import StudyRecords, how_to_confirm
from megabench.study.study import Attempt, Study, StudyError, Trial
from megabench.study.summary import write_csv
from megabench.supervisor.root_cause import Verdict

_REPEAT = re.compile(r"repeat-\d+")


class Results:
    """The records of a study in the directory `out`, in the study's order. All files are rewritten after every run."""

    def __init__(self, out: Path, study: Study) -> None:
        self.out, self.study = out, study
        self._trials = {trial.id: trial for trial in study.trials}
        self._by_key: dict[tuple[str, int], RunRecord] = {}
        self._of_others: list[RunRecord] = []
        self._tensors: dict[tuple[Key, Key], TensorParity] = {}
        self._claim: RunLock | None = None
        self.not_written: str | None = None

    @classmethod
    def open(cls, out: Path, study: Study) -> "Results":
        """Read the results in `out` of the trials of this study.

        `start` moves the results of other trials to another file.

        Raises StudyError if the directory is not writable or was not written by a study, and RunLockedError if another
        process writes into it.
        """
        results = cls(out, study)
        nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise StudyError(f"--out {out} cannot be created: {nearest} is not writable; use another path")
        check_free(out)
        results._check_own()
        try:
            records = read_records(results._jsonl)
        except RecordError as error:
            raise StudyError(f"{error}; move the file away to start a new study") from None
        for record in records:
            if record.trial_id and (trial := results._trials.get(record.trial_id)):
                results._by_key[record.trial_id, record.repeat] = record.model_copy(update={"trial": trial.name})
            else:
                results._of_others.append(record)
        return results

    def _check_own(self) -> None:
        """Raise StudyError if the study would overwrite files that no study has written."""
        if self._is_source and self.study.as_run not in (None, read_text(self._copy)):
            raise StudyError(
                f"{self.study.source} would be overwritten by the study with --set, --repeats, --plan or "
                f"--emulate-hosts applied; use another --out"
            )
        if self._environment.exists() or self._jsonl.exists():
            return
        others = [] if self._is_source else [self._copy]
        for attempt in self.study.attempts:
            others += [self.logs(attempt), self.tensorboard(attempt)]
        if found := [path for path in others if path.exists()]:
            raise StudyError(f"{found[0]} already exists and was not written by a study; use another --out")

    @property
    def _is_source(self) -> bool:
        """Whether the study file itself is at the path to which it would be copied."""
        return self._copy.exists() and self._copy.samefile(self.study.source)

    @property
    def attempts(self) -> list[Attempt]:
        """The runs of the study, and additional runs of its trials that have a record (--confirm), by rounds."""
        more = [
            Attempt(self._trials[trial_id], repeat)
            for trial_id, repeat in self._by_key
            if repeat >= self._trials[trial_id].repeats
        ]
        places = {trial.name: place for place, trial in enumerate(self.study.trials)}
        both = [*self.study.attempts, *more]
        return sorted(both, key=lambda attempt: (attempt.repeat, places[attempt.trial.name]))

    @property
    def records(self) -> list[RunRecord]:
        """The records so far, in the study's order, with the parity of all of them."""
        ordered = [self._by_key[attempt.key] for attempt in self.attempts if attempt.key in self._by_key]
        self._compare_tensors(ordered)
        return judge_parity(ordered, self.study.reference, self._tensors)

    def _compare_tensors(self, records: Sequence[RunRecord]) -> None:
        """Compare the sketches of each run with those of its reference, once."""
        standards = standards_of(records, self.study.reference)
        files: dict[Key, Path] = {attempt.key: self.sketches(attempt) for attempt in self.attempts}
        for record in records:
            if not record.work_class or not (standard := standards.get(record.work_class.id)) or record is standard:
                continue
            pair = key_of(record), key_of(standard)
            ours, theirs = (files[key] for key in pair)
            if pair not in self._tensors and ours.exists() and theirs.exists():
                # importing torch takes seconds, and not every study needs it
                from megabench.tensor_parity import ParityError, compare_files

                try:
                    self._tensors[pair] = compare_files(ours, theirs)
                except ParityError as error:
                    self._tensors[pair] = TensorParity(
                        num_tensors=0, largest="none", part_of_tolerance=0.0, problems=[str(error)]
                    )

    @property
    def how_to_confirm(self) -> str | None:
        """A sentence with the command that confirms the ranking, if the copy of the study can run."""
        return how_to_confirm(self.out, self.study, list(self._by_key.values()))

    @property
    def by_folder(self) -> dict[Path, RunRecord]:
        """The records so far by the directories of their runs under `logs` and `tensorboard`."""
        return {attempt.folder: self._by_key[attempt.key] for attempt in self.attempts if attempt.key in self._by_key}

    @property
    def _jsonl(self) -> Path:
        return self.out / "results.jsonl"

    @property
    def _copy(self) -> Path:
        return self.out / "study.yaml"

    @property
    def _environment(self) -> Path:
        return self.out / "environment.json"

    def choose(self, resume: bool, only: Sequence[str]) -> list[Attempt]:
        """Return the runs of the trials selected by `only`. With `resume`, omit runs that are already ok.

        Raises StudyError if a pattern matches no trial, or if results would be overwritten without --resume or --only.
        """
        if self._jsonl.exists() and not resume and not only:
            raise StudyError(
                f"{self._jsonl} already contains results; add --resume to continue the study, or use another --out"
            )
        attempts = self.select(only)
        if self._jsonl.exists() and not self.records and self._jsonl.stat().st_size:
            raise StudyError(
                f"{self._jsonl} contains only results of other trials, which would be lost; use another --out, or the "
                f"study and the --set options of those results"
            )
        if not resume:
            return attempts
        good = {(record.trial_id, record.repeat) for record in self.records if record.status == "ok"}
        return [attempt for attempt in attempts if attempt.key not in good]

    def select(self, only: Sequence[str]) -> list[Attempt]:
        """Return the runs of the trials selected by `only`, or all runs if `only` is empty."""
        chosen = self.study.select(only)
        return [attempt for attempt in self.attempts if attempt.trial in chosen]

    def all_ok(self, attempts: Sequence[Attempt]) -> bool:
        """Return whether each of these runs has a record with status ok."""
        status = {(record.trial_id, record.repeat): record.status for record in self.records}
        return all(status.get(attempt.key) == "ok" for attempt in attempts)

    def start(self) -> str | None:
        """Lock the directory, and write the study file and the environment before the first run.

        If the study no longer contains the trials of some records, these records are moved to another file. Return a
        message about them, or None.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        self._claim = RunLock(self.out)
        # write this file first, because it marks the directory as the results of a study
        self._environment.write_text(json.dumps(_describe_machine(), indent=2) + "\n")
        said = self._put_aside()
        if not self._is_source:
            text = self.study.as_run or read_text(self.study.source)
            self._copy.write_text(without_secrets(text), encoding="utf-8")
        return said

    def _put_aside(self) -> str | None:
        if not self._of_others:
            return None
        aside = self.out / "results-of-others.jsonl"
        write_records(aside, [*read_records(aside), *self._of_others])
        names = ", ".join(dict.fromkeys(record.trial for record in self._of_others))
        self._of_others = []
        self.write()
        return f"Measured under other settings, and put aside in {aside}: {names}"

    def logs(self, attempt: Attempt) -> Path:
        return self.out / "logs" / attempt.folder

    def sketches(self, attempt: Attempt) -> Path:
        """The path of the sketches that the run writes."""
        return self.logs(attempt) / "sketches.safetensors"

    @property
    def initial_models(self) -> Path:
        """The directory for initial weights that programs load. It exists only while the study runs."""
        return self.out / "initial-models"

    def tensorboard(self, attempt: Attempt) -> Path:
        return self.out / "tensorboard" / attempt.folder

    def found(self, trial: Trial) -> tuple[AutoSetting, list[Probe]] | None:
        """Return the setting that an earlier run of `trial` found, and its short runs, or None."""
        for record in self._by_key.values():
            is_found = any(probe.status == "ok" for probe in record.probes or ())
            if record.trial_id == trial.id and is_found and record.probes:
                return AutoSetting(record.micro_batch, record.options["recompute"]), record.probes
        return None

    def clear(self, attempt: Attempt) -> None:
        """Forget an earlier attempt of this run, and remove its logs, so that they are not mistaken for new ones."""
        self._tensors = {pair: found for pair, found in self._tensors.items() if attempt.key not in pair}
        for key, record in self._by_key.items():  # comparisons with this run, whose sketches no longer exist
            if record.parity and record.parity.reference == attempt.trial.name:
                self._by_key[key] = record.model_copy(update={"parity": None})
        for folder in (self.logs(attempt), self.tensorboard(attempt)):
            for path in folder.glob("*"):
                if path.is_dir() and not path.is_symlink():
                    # the directory of a trial contains those of its repeats, which are other runs
                    if not _REPEAT.fullmatch(path.name):
                        shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        self.logs(attempt).mkdir(parents=True, exist_ok=True)

    def add(self, attempt: Attempt, record: RunRecord) -> RunRecord:
        """Add the record of a run, rewrite all files, and return the record with its parity."""
        trial = attempt.trial
        update = {
            "trial": trial.name,
            "trial_id": trial.id,
            "repeat": attempt.repeat,
        }
        record = record.model_copy(update=update)
        if self.study.predictor:
            record.prediction = self.study.predictor.predict(record)
        self._by_key[attempt.key] = record
        self.write()
        return next(record for record in self.records if (record.trial_id, record.repeat) == attempt.key)

    def write(self) -> None:
        """Write the files of all records so far. Raises RunLockedError if another process has taken over.

        `not_written` is an error message if writing fails, e.g. because the disk is full, and None if it succeeds. A
        later call of `write` writes all records again.
        """
        if self._claim and (loss := self._claim.loss):
            raise RunLockedError(loss)
        records = self.records
        try:
            write_records(self._jsonl, records)
            write_csv(self.out / "summary.csv", records, self.study.reference)
            self.write_report()
            self.not_written = None
        except OSError as error:
            self.not_written = f"the results in {self.out} could not be written: {error.strerror}"

    def close(self) -> None:
        """Remove the initial weights of programs, and release the lock of the directory."""
        shutil.rmtree(self.initial_models, ignore_errors=True)
        if self._claim:
            self._claim.release()

    def write_report(self) -> Path:
        """Write the report of the records so far, and return its path."""
        path, study, records = self.out / "report.html", self.study, tuple(self.records)
        findings = examine(records, study.reference)
        shown = StudyRecords(
            study.name, study.question, study.reference, records, study.answers, confirm=self.how_to_confirm
        )
        write_report(path, shown, findings)
        return path


def failed_record(
    trial: Trial,
    verdict: Verdict,
    num_hosts: int | None,
    found: AutoSetting | None = None,
    probes: list[Probe] | None = None,
) -> RunRecord:
    """Return the record of a run without a result: its configuration, and the reason.

    `found` is the setting that the short runs found, if any, and `probes` are the results of the short runs.
    """
    gpus = gpu_names()
    config = apply_setting(trial.config, found) if found else trial.config
    resolved = config.resolve(trial.world_size, trial.resolved.device) if found else trial.resolved
    return RunRecord(
        **requested_fields(resolved, config, trial.env),
        **auto_fields(config),
        trial=trial.name,
        work_class=None,
        status=verdict.status,
        error=verdict.error or "",
        failure=verdict.failure,
        num_hosts=num_hosts,
        probes=probes,
        device=(gpus[0] if gpus else None) if trial.resolved.device == "cuda" else "cpu",
        ended_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _describe_machine() -> dict[str, Any]:
    """Return the content of environment.json of a study."""
    return environment.collect().model_dump() | {
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpus": gpu_names(),
    }
