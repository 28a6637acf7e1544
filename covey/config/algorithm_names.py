"""Names of the algorithms, checked before torch is imported, which their formulas need."""

from __future__ import annotations

from covey.errors import ConfigError, nearest

ALGORITHM_NAMES = (
    "grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "gtpo", "grpo_s", "gtpo_trajectory", "rloo",
    "reinforce_pp", "reinforce_pp_baseline", "lite_ppo", "opo", "gpg", "cispo", "gmpo", "sapo",
    "clip_cov", "kl_cov", "luspo", "vespo", "dppo",
)  # fmt: skip
"""The keys of covey.objective.ALGORITHMS, in the same order."""
COMPOSED = "composed"
"""An objective composed of pieces that the configuration names."""


def check_algorithm_name(name: str) -> None:
    """Reject a name that is no algorithm."""
    if name != COMPOSED and name not in ALGORITHM_NAMES:
        hint = nearest(name, [*ALGORITHM_NAMES, COMPOSED])
        raise ConfigError(f"config: objective.name = {name!r} is not known{hint}")
