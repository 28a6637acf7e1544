"""Rollouts: sampling and scoring groups, filters, and the source the loop takes them from."""
