"""Models: named shapes, the weight mapping between Hugging Face and parallel layouts, and sources of weights."""
