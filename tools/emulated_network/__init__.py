"""The NCCL net plugin for emulated hosts, and a check of it on GPUs."""
