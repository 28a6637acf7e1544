"""Rollouts: episodes, collecting and scoring of groups, filters, and sources for the loop."""
