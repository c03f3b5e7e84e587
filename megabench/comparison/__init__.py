"""Run a study: its trials, its results and its report."""
