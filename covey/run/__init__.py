"""The run folder: its records, metrics, health checks and trackers, without importing torch."""
