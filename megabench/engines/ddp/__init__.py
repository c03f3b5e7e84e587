"""Data parallelism with whole replicas, by torch."""
