"""Run folders, metrics, health checks, trackers. No module of `covey.records` imports torch."""
