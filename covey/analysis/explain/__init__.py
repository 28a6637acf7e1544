"""Explanation of a recorded step: gradients of tokens, for the run's own algorithm and others."""
