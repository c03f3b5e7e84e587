"""Comparisons: a study file becomes trials, each run in fresh processes, held against each other by their records."""
