"""Entry point of an engine process, started as `python -m covey.training.engine_worker FD FD`.

The two arguments are the file descriptors of the pipes to the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.config import parse_config
from covey.engines.native.engine import NativeCopy
from covey.engines.process.worker import main
from covey.training.build import load_model
from covey.training.make_engine import precision_of


def _engine(settings: Mapping[str, Any]) -> NativeCopy:
    """Build the engine from its settings, on the device `engine.device`."""
    config = parse_config(settings)
    device = config.model.device if config.engine.device == "auto" else config.engine.device
    changed = config.model.model_copy(update={"device": device, "gradient_checkpointing": False})
    model = load_model(config.model_copy(update={"model": changed}))
    return NativeCopy(model, precision_of(config))


if __name__ == "__main__":
    main(_engine)
