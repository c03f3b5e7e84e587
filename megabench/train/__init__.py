"""Training of one run: the loop, its timing, its log and its record. `python -m megabench.train` starts a run."""
