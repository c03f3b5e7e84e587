"""Predict the step time and the memory of a layout from formulas, before it runs. Loads no torch.

The prediction combines operations, collectives, the pipeline timeline and the cost model of an engine. `search`
predicts all candidates.

Symbols: B micro-batch, S sequence, H hidden, F FFN, L layers, N heads, K KV heads, D head dim, V vocabulary;
T, P, C = tp, pp, cp sizes.
"""
