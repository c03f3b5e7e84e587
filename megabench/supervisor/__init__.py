"""Start, monitor and stop the processes of a trial on one or several hosts, and classify failures."""
