"""The chaos suite: training runs that are killed, frozen, stopped, starved of disk and damaged at random moments.

`python -m tests.chaos --kills 100 --seed N` prints a line about each disturbance and a summary, and ends with status 1
if a run resumed wrongly, lost a healthy checkpoint, or left something behind.
"""
