"""The chaos suite: training runs that are killed, frozen, stopped, starved of disk and damaged at random moments.

`python -m tests.chaos --kills 100 --seed N` prints a line about each disturbance and a summary, and ends with status 1
if a run resumed wrongly, lost a healthy checkpoint, or left something behind. `python -m tests.chaos --rollbacks 100
--seed N` trains runs with bad batches that roll back, and ends with status 1 if a checkpoint is damaged or differs from
that of an undisturbed run.
"""
