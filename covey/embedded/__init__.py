"""The small model that ships with the package, and the recipe that makes it."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""An ordinary Hugging Face folder."""
