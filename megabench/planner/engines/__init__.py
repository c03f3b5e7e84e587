"""What the planner knows of each engine: which variants it predicts, and their time and memory."""
