"""Explanation of a recorded step: its gradient token by token, for its own and other algorithms."""
