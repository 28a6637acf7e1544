"""Explains a recorded training step by its token gradients, also for other algorithms."""
