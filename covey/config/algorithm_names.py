"""Names and titles of the algorithms, available without importing torch."""

from __future__ import annotations

from collections.abc import Mapping

from covey.errors import ConfigError, nearest

ALGORITHM_TITLES: Mapping[str, str] = {
    "grpo": "Group Relative Policy Optimization, arXiv 2402.03300",
    "dr_grpo": "GRPO Done Right, arXiv 2503.20783",
    "dapo": "Decoupled Clip and Dynamic Sampling Policy Optimization, arXiv 2503.14476",
    "gspo": "Group Sequence Policy Optimization, arXiv 2507.18071",
    "gspo_token": "GSPO with token-level advantages, arXiv 2507.18071",
    "gtpo": "Group Token Policy Optimization, arXiv 2508.04349",
    "grpo_s": "GRPO shaped by the entropy of each completion, arXiv 2508.04349",
    "gtpo_trajectory": "Group-relative Trajectory-based Policy Optimization, arXiv 2508.03772",
    "rloo": "REINFORCE Leave-One-Out, arXiv 2402.14740",
    "reinforce_pp": "REINFORCE++, arXiv 2501.03262",
    "reinforce_pp_baseline": "REINFORCE++ with the group's mean as baseline, arXiv 2501.03262",
    "lite_ppo": "Lite PPO, arXiv 2508.08221",
    "opo": "On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585",
    "gpg": "Group Policy Gradient, arXiv 2504.02546",
    "cispo": "Clipped IS-weight Policy Optimization, arXiv 2506.13585",
    "gmpo": "Geometric-Mean Policy Optimization, arXiv 2507.20673",
    "sapo": "Soft Adaptive Policy Optimization, arXiv 2511.20347",
    "clip_cov": "Clip-Cov, arXiv 2505.22617",
    "kl_cov": "KL-Cov, arXiv 2505.22617",
    "luspo": "Length-Unbiased Sequence Policy Optimization, arXiv 2602.05261",
    "vespo": "Variational sequence-level soft policy optimization, arXiv 2602.10693",
    "dppo": "Divergence PPO with total variation, arXiv 2602.04879",
    "gdpo": "Group reward-Decoupled normalization Policy Optimization, arXiv 2601.05242",
    "maxrl": "Maximum likelihood RL, arXiv 2602.02710",
    "pkpo": "Pass-at-k Policy Optimization, arXiv 2505.15201",
    "gfpo": "Group Filtered Policy Optimization, arXiv 2508.09726",
    "scalerl": "The loss of ScaleRL, arXiv 2510.13786",
    "bapo": "Balanced Policy Optimization with adaptive clipping, arXiv 2510.18927",
    "m2po": "Second-Moment trust Policy Optimization, arXiv 2510.01161",
    "decoupled_ppo": "Decoupled PPO, arXiv 2110.00641",
    "opd": "On-policy distillation, arXiv 2306.13649",
    "sdpo": "Self-Distillation Policy Optimization, arXiv 2601.20802",
    "gigpo": "Group-in-Group Policy Optimization, arXiv 2505.10978",
    "ppo": "Proximal Policy Optimization with a critic, arXiv 1707.06347",
    "dpo": "Direct Preference Optimization, arXiv 2305.18290",
    "ipo": "Identity Preference Optimization, arXiv 2310.12036",
}
"""Title of each algorithm, in the order of `covey.objective.ALGORITHMS`, which has the same
keys."""
ALGORITHM_NAMES = tuple(ALGORITHM_TITLES)
PAIRED = frozenset({"dpo", "ipo"})
"""Algorithms that train on preference pairs. A loss over pairs has no importance ratio, and its
`beta` is not the weight of a KL penalty."""
COMPOSED = "composed"
"""The value of `objective.name` for a user's combination of advantage, ratio, surrogate and
weights."""


def check_algorithm_name(name: str) -> None:
    """Raise ConfigError if a name is not the name of an algorithm."""
    if name != COMPOSED and name not in ALGORITHM_NAMES:
        hint = nearest(name, [*ALGORITHM_NAMES, COMPOSED])
        raise ConfigError(f"config: objective.name = {name!r} is not a known algorithm{hint}")
