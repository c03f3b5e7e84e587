"""`megabench calibrate`: measures this machine in about a minute, into a profile that `megabench plan` reads.

Every rank times the same things at the same moment, as in training, and the slowest counts.
"""
