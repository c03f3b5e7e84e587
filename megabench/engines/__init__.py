"""How a step runs: one module or folder an engine; no engine imports another."""
