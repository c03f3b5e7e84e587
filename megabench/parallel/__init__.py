"""Layouts, placement of ranks, and process groups."""
