"""Facts about the machine: hosts, GPUs, NVLinks, NICs, topology and throttling."""
