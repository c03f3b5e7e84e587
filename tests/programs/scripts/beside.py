"""A module that a script imports from its own directory."""

LENGTH = 24
