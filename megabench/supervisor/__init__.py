"""Starts, watches and stops the processes of a trial, on one host or many, and classifies how they ended."""
