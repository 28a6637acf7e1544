"""Trackers, which receive the numbers of a run: JSON Lines for every run, and the console."""

from covey.run.trackers.jsonl import JsonlTracker
from covey.run.trackers.protocol import Tracker, Trackers

__all__ = ["JsonlTracker", "Tracker", "Trackers"]
