"""Data parallelism with full replicas (torch's DDP)."""
