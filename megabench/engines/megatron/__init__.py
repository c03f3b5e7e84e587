"""TP × PP × CP × DP on megatron-core.

Importing this package prepares megatron-core before its first import.
"""

from megabench.runtime.megatron_core import prepare

prepare()
