"""Runs a study: its trials, its results, its report."""
