"""Explains recorded training steps by token gradients, and replays them with other algorithms."""
