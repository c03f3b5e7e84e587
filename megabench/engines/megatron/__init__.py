"""TP × PP × CP × DP on megatron-core.

Importing this package readies megatron-core for a machine without a GPU, before anything imports it.
"""

from megabench.runtime import megatron_cpu

megatron_cpu.install()
