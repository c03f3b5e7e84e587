"""Where it runs: device and backend, rendezvous, messages between a run and its supervisor."""
