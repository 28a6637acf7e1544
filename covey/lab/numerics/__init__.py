"""Measures the size, cause and severity of log-prob differences between engine and trainer."""
