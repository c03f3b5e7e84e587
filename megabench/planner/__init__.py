"""Predict the step time and the memory of a layout from formulas, before it runs. Loads no torch.

A step is put together from the bottom up: operations (compute), collectives (network), the schedule's timeline
(schedule), and what an engine does with them (engines); search takes every candidate through it.

Symbols: B micro-batch, S sequence, H hidden, F FFN, L layers, N heads, K KV heads, D head dim, V vocabulary;
T, P, C = tp, pp, cp sizes.
"""
