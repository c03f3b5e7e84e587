"""Tables of what updates the weights: learning-rate schedules."""
