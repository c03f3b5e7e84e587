"""Tables of what updates the weights: optimizers and learning-rate schedules."""
