"""Rollouts: episodes, collecting and scoring groups, filters, and the source of the loop."""
