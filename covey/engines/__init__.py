"""Engines: what generates completions."""
