"""Descriptions of the engines: the settings they accept and what a step costs. Loads neither an engine nor torch."""
