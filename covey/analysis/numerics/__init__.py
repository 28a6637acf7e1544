"""Measures how the log-probs of engine and trainer differ: size, cause and severity."""
