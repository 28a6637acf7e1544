"""Training: the loop and its moves."""
