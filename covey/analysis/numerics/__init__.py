"""Differences between the log-probs of engine and trainer: size, cause and severity."""
