"""Describes each engine without loading it: what it accepts and what it costs. Loads no torch."""
