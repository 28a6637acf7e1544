"""Explanation of a recorded step: token gradients of the run's algorithm and other algorithms."""
