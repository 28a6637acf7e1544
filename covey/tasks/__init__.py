"""Tasks: prompts with targets, from generators, packaged problems, files and the Hub. No torch.

This file does not import the registry, whose tasks may stand in `covey.recipes`.
"""
