"""Checkpoints: saving, validation and loading of training state, independent of the layout.

A checkpoint is a directory of safetensors files with a manifest. The files contain rectangular blocks of Hugging Face
tensors in fp32. A run can load a checkpoint that was written under any layout. Loading a checkpoint never unpickles
data.
"""

from megabench.errors import UserError


class CheckpointError(UserError):
    """Raised if a checkpoint cannot be loaded, or cannot be written to the given path."""
