"""Trackers, which receive the metrics of a run, for JSON Lines, the console and other packages."""

from covey.run.trackers.jsonl import JsonlTracker
from covey.run.trackers.protocol import Tracker, Trackers

__all__ = ["JsonlTracker", "Tracker", "Trackers"]
