"""Scripts as users of HF Trainer write them, for `megabench compare --trainer`."""
