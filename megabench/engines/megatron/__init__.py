"""TP × PP × CP × DP on megatron-core.

Importing this package readies megatron-core for a machine without a GPU, before anything imports it.
"""

import warnings

from megabench.runtime import megatron_cpu

megatron_cpu.install()

# megatron-core's schedules look at the gradients of stage outputs: as intended, and said once a rank otherwise
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
