"""Training: the loop, the training step, the optimizer and checkpoints."""
