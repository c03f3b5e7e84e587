"""Predict the step time and the memory of a layout from formulas, before it runs. Loads no torch.

The prediction combines operations, collectives, the pipeline timeline and the cost model of an engine. `search`
predicts all candidates.

Symbols: Symbols: B micro-batch, S sequence length, H hidden size, F FFN size, L layers, N heads, K KV heads, D head
dim, V vocabulary size, T tp, P pp, C cp.
"""
