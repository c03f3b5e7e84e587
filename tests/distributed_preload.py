"""What the workers of tests/distributed.py share from the start: the imports that take seconds."""

import warnings

warnings.simplefilter("ignore")

import torch.distributed  # noqa: E402, F401
import transformers.models.llama.modeling_llama  # noqa: E402, F401
