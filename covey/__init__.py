"""Covey: group-relative reinforcement learning for language models.

The public API. The package imports each public name on first use, so that `import covey` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from covey._version import __version__

if TYPE_CHECKING:
    from covey import functional
    from covey.api import CompareResult, TrainResult, compare, evaluate, load_config, train
    from covey.config import Config
    from covey.environments import Environment, Start, Step, ToolEnvironment, ToolError
    from covey.errors import CoveyError
    from covey.evaluation import Estimate
    from covey.evaluation.evaluate import Evaluation
    from covey.records.trackers import Tracker
    from covey.rewards import Reward, Score
    from covey.types import Group, Prompt, Rollout

_PLACES = {
    "CompareResult": "covey.api",
    "Config": "covey.config",
    "CoveyError": "covey.errors",
    "Environment": "covey.environments",
    "Estimate": "covey.evaluation",
    "Evaluation": "covey.evaluation.evaluate",
    "Group": "covey.types",
    "Prompt": "covey.types",
    "Reward": "covey.rewards",
    "Rollout": "covey.types",
    "Score": "covey.rewards",
    "Start": "covey.environments",
    "Step": "covey.environments",
    "ToolEnvironment": "covey.environments",
    "ToolError": "covey.environments",
    "Tracker": "covey.records.trackers",
    "TrainResult": "covey.api",
    "compare": "covey.api",
    "evaluate": "covey.api",
    "load_config": "covey.api",
    "train": "covey.api",
}

__all__ = [
    "CompareResult",
    "Config",
    "CoveyError",
    "Environment",
    "Estimate",
    "Evaluation",
    "Group",
    "Prompt",
    "Reward",
    "Rollout",
    "Score",
    "Start",
    "Step",
    "ToolEnvironment",
    "ToolError",
    "Tracker",
    "TrainResult",
    "__version__",
    "compare",
    "evaluate",
    "functional",
    "load_config",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in __all__ and (why := importlib.import_module("covey.supported").problem()):
        raise ImportError(why)
    if name == "functional":
        return importlib.import_module("covey.functional")
    if name not in _PLACES:
        raise AttributeError(f"module 'covey' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
