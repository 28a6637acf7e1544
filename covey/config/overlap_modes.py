"""Check that the settings of overlap and engine fit together, without loading a model."""

from __future__ import annotations

from covey.config.schema import Config
from covey.errors import ConfigError


def check_overlap(config: Config) -> None:
    """Reject a setting of [overlap] or [engine] if settings that it needs are missing."""
    overlap, engine = config.overlap, config.engine
    if overlap.mode == "copy" and engine.kind == "native" and not config.cluster.engine_actors:
        raise ConfigError(
            "config: overlap.mode = 'copy' needs an engine with its own copy of the weights; set "
            "engine.kind = 'process' or 'vllm', or set overlap.mode = 'ahead'"
        )
    if overlap.in_flight and not (overlap.staleness and overlap.mode == "copy"):
        raise ConfigError(
            "config: overlap.in_flight = true needs overlap.mode = 'copy' and overlap.staleness "
            "of at least 1, because otherwise the engine is idle while the weights change"
        )
    if engine.device != "auto" and engine.kind != "process":
        raise ConfigError(
            f"config: engine.device = {engine.device!r} needs engine.kind = 'process'; the native "
            "engine generates on model.device"
        )
