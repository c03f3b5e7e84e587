"""One run: the loop, its timing and log, and the record it leaves. `python -m megabench.train` runs it."""
