"""`megabench calibrate`: measure this machine in about a minute and write a profile for `megabench plan`.

All ranks time each operation simultaneously, as in training. The profile contains the slowest rank's times.
"""
