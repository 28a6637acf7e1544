"""The embedded models: small checkpoints in the package, and the recipes that train them."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""An ordinary Hugging Face model folder."""
CALCULATOR = Path(__file__).parent / "calculator_checkpoint"
"""The same, of a model that can call a calculator."""
MODELS = {"embedded": CHECKPOINT, "embedded-calculator": CALCULATOR}
"""By the name that model.path takes."""
