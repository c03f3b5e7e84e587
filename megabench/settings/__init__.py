"""Declares and reads the settings of a run. Loads no torch."""
