"""Files of a run, metrics, health checks and trackers. No module of `covey.run` imports torch."""
