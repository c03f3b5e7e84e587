"""NVIDIA's Megatron-FSDP."""
