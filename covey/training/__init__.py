"""Training: the loop, the optimizer step, checkpoints."""
