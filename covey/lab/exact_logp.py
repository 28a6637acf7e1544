"""Says whether an engine's log-probs are exact, for commands that run without the engine.

The engine declares in `EngineInfo.exact_logp` whether its log-probs are exact. When a run starts,
it records the value of `exact_logp`.
"""

from __future__ import annotations

from covey.config import Config
from covey.lab.plan.forecast import cuda_available
from covey.notices import notice
from covey.records.folder import CHANGES, RunFolder
from covey.records.records import ANY_OBJECT, usable_lines


def recorded_exact_logp(run: RunFolder, config: Config) -> bool:
    """Return whether a run's engine has exact log-probs, according to the run's newest record.

    Earlier versions of Covey did not record whether log-probs are exact. For a run of an earlier
    version, return `expected_exact_logp(config)`.
    """
    records = [run.environment(), *usable_lines(run.path / CHANGES, ANY_OBJECT, notice)]
    declared = [record["exact_logp"] for record in records if "exact_logp" in record]
    return bool(declared[-1]) if declared else expected_exact_logp(config)


def expected_exact_logp(config: Config) -> bool:
    """Return whether the engine of this configuration will have exact log-probs."""
    if config.engine.kind == "vllm" or config.engine.rounds:
        return False
    if config.model.dtype != "auto":
        return config.model.dtype == "float32"
    own = config.engine.kind == "process" and config.engine.device != "auto"
    device = config.engine.device if own else config.model.device
    # With "auto", a model computes in float32 except on a GPU.
    return not device.startswith("cuda") and not (device == "auto" and cuda_available())
