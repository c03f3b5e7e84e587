"""Checkpoints: what a directory of them holds, which of them are good, and how state gets in and out.

A checkpoint is a folder of safetensors files and a manifest. Its tensors are rectangles of Hugging Face tensors, in
fp32: whatever layout wrote them, any other finds its own part. Nothing in it is ever unpickled.
"""

from megabench import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be used, or a place where none can be written."""
