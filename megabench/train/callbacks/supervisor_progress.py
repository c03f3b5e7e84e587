"""Reports the progress of a rank to its supervisor."""

from megabench.runtime.messages import Progress, report_progress
from megabench.runtime.rendezvous import Rendezvous
from megabench.train.callbacks.callback import Callback, Step, TrainerState


class SupervisorProgress(Callback):
    """Writes the activity and the number of finished steps to the store, where the supervisors of a study read it."""

    def __init__(self, rendezvous: Rendezvous, num_steps: int) -> None:
        self._rendezvous, self._num_steps = rendezvous, num_steps

    def on_start(self, trainer: TrainerState) -> None:
        self._report("loading the model")

    def on_ready(self, trainer: TrainerState) -> None:
        self._report("first step")

    def on_step_end(self, step: Step) -> None:
        self._report("training", step.number, step.seconds)

    def _report(self, activity: str, step: int = 0, step_seconds: float | None = None) -> None:
        progress = Progress(activity, step, self._num_steps, step_seconds)
        report_progress(self._rendezvous.store, self._rendezvous.rank, progress)
