"""Trackers, which write the metrics of a run to JSON Lines, to the console or to other packages."""

from covey.run.trackers.jsonl import JsonlTracker
from covey.run.trackers.protocol import Tracker, Trackers

__all__ = ["JsonlTracker", "Tracker", "Trackers"]
