"""Training programs that people run, as trials beside the engines: transformers' Trainer."""
