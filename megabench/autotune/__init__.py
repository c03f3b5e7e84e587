"""Finding the settings that are left to be found: a few short runs of a trial's own work."""
