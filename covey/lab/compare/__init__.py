"""Compares algorithms or settings: trains the runs, tests the differences, and writes reports."""
