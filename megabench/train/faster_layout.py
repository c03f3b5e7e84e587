"""Says if the plan predicts another layout to be much faster on the same GPUs."""

from contextlib import suppress
from threading import Thread

from megabench.config.record_fields import requested_fields
from megabench.planner.faster_layout import faster_layout
from megabench.planner.predict import is_planned
from megabench.record import RunRecord
from megabench.train.callbacks.callback import Callback, Step, TrainerState
from megabench.train.run_record import work_class


class FasterLayout(Callback):
    """Prints one line after the first step for which the prediction is ready, or nothing.

    A thread predicts while the engine is built, because the search takes seconds for thousands of GPUs. A prediction
    that fails must not end the run.
    """

    def on_start(self, trainer: TrainerState) -> None:
        self._trainer, self._line = trainer, ""
        self._thread: Thread | None = Thread(target=self._predict, name="faster-layout", daemon=True)
        self._thread.start()

    def on_step_end(self, step: Step) -> None:
        if self._thread and not self._thread.is_alive():
            self._thread = None
            if self._line:
                self._trainer.note(self._line)

    def _predict(self) -> None:
        trainer = self._trainer
        if not is_planned(trainer.requested):
            return
        with suppress(Exception):
            record = RunRecord(
                **requested_fields(trainer.requested, trainer.given),
                trial="",
                work_class=work_class(trainer.requested, trainer.source),
                status="ok",
                num_hosts=len(trainer.placement.topology.hosts),
                device=trainer.device_name,
            )
            self._line = faster_layout(record, trainer.placement.topology) or ""
