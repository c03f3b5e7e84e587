"""The cost model of a training step, from formulas and measured constants. Loads no torch."""
