"""Rollouts: episodes, collecting and scoring of groups, filters, and rollout sources."""
