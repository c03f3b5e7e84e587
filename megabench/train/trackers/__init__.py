"""Trackers: callbacks that log the metrics of each step."""
