"""What is trained: named shapes, the weight mapping, the initial weights."""
