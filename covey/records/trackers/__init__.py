"""Trackers write the metrics of a run to files, to the console or to tools such as W&B."""

from covey.records.trackers.protocol import JsonlTracker, Tracker, Trackers

__all__ = ["JsonlTracker", "Tracker", "Trackers"]
