"""Run folders, metrics, health checks, trackers. No module of `covey.run` imports torch."""
