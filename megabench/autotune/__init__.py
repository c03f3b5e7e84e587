"""Find the values of "auto" settings by a few short runs of the trial."""
