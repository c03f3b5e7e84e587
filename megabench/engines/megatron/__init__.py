"""TP × PP × CP × DP on megatron-core.

Importing this package readies megatron-core, before anything imports it.
"""

from megabench.runtime.megatron_core import prepare

prepare()
