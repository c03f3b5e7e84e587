"""Measure the accuracy of the planner, fitted to some published measurements and tested on others.

`make validate-planner DATA=…`.
"""
