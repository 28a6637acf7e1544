"""Covey: group-relative reinforcement learning for language models."""
