"""The embedded models: small checkpoints in the package, trained by scripts in tools/."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The checkpoint folder of the model `embedded`, in Hugging Face format."""
CALCULATOR = Path(__file__).parent / "calculator_checkpoint"
"""The checkpoint of the model `embedded-calculator`, which can call a calculator."""
MODELS = {"embedded": CHECKPOINT, "embedded-calculator": CALCULATOR}
"""Maps the name of an embedded model, as in `model.path`, to its checkpoint folder."""
