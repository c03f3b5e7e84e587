"""torch's FSDP2."""
