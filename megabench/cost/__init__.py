"""What a step costs, from formulas and measured constants. Loads no torch."""
