"""Where the model goes: the layout and its process groups."""
