"""The embedded model: a small checkpoint in the package, and the recipe that trains it."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""An ordinary Hugging Face model folder."""
