"""Engines: they generate completions."""
