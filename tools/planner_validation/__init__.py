"""Validation of the planner on published measurements, some fitted and others held out: `make validate-planner`."""
