"""Finds the settings that are "auto" by a few short runs of the trial."""
