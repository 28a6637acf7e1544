"""The files of a run, its metrics, health checks and trackers. No module here imports torch."""
