"""Trackers: where the numbers of a run go while it trains. jsonl always, console for a person."""

from covey.run.trackers.jsonl import JsonlTracker
from covey.run.trackers.protocol import Tracker, Trackers

__all__ = ["JsonlTracker", "Tracker", "Trackers"]
