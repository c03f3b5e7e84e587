"""How long a study is predicted to take on a cluster. Loads no torch."""

from collections.abc import Sequence

from megabench.doctor.plan_rules import place_trial
from megabench.doctor.predicted_trials import Predictions, predict
from megabench.hardware.topology import Topology
from megabench.study.study import Trial

# Seconds from the end of a run to the end of the next one, without its steps: new processes, imports, initial weights,
# compilation and the end of the processes. For whole Llama-3-8B on four H200s (benchmarks/), 90% of the runs need less.
SECONDS_TO_START = 60.0


def predicted_duration(trials: Sequence[Trial], topology: Topology) -> str:
    """Return sentences with the predicted minutes of a study, and with the trials that may not fit.

    Every run needs `SECONDS_TO_START` and its steps. Short runs for settings that are "auto" are not counted.
    """
    predictions = Predictions()
    predicted = {trial.name: predict(place_trial(trial, topology), predictions) for trial in trials}
    estimates = {name: found.estimate if found else None for name, found in predicted.items()}
    seconds = sum(
        trial.repeats * trial.resolved.steps * estimate.step_seconds
        for trial in trials
        if (estimate := estimates[trial.name])
    )
    num_runs = sum(trial.repeats for trial in trials)
    minutes = (seconds + SECONDS_TO_START * num_runs) / 60
    said = [
        f"Predicted duration: {minutes:.0f} minutes, {seconds / 60:.1f} of them steps, and {SECONDS_TO_START:.0f} s to "
        f"start each of {num_runs} runs."
    ]
    if unknown := [name for name, estimate in estimates.items() if not estimate]:
        said.append(f"The steps of {', '.join(unknown)} are not predicted and not counted.")
    if misfits := [name for name, estimate in estimates.items() if estimate and not estimate.fits]:
        said.append(f"May not fit into memory: {', '.join(misfits)}.")
    if any(trial.config.auto_settings for trial in trials):
        said.append("Short runs for settings that are auto are not counted.")
    return " ".join(said)
