"""Tried ways of getting a reward without earning it. No torch here."""
