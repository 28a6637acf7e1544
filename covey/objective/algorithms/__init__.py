"""The algorithms, each one function that puts the pieces together.

A function's keyword arguments are the algorithm's hyper-parameters; its docstring is the formula,
its source, and where we depart from it. To add one: write the function, name it here, give it a
worked number under tests/objective, and let `make docs` write its page.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from covey.objective.algorithms.clipped import (
    dapo,
    dr_grpo,
    grpo,
    lite_ppo,
    opo,
    reinforce_pp,
    reinforce_pp_baseline,
)
from covey.objective.algorithms.sequence import gmpo, grpo_s, gspo, gspo_token, luspo, rloo
from covey.objective.algorithms.token import clip_cov, gtpo, gtpo_trajectory, kl_cov
from covey.objective.algorithms.turns import gigpo
from covey.objective.algorithms.weighted import cispo, dppo, gpg, sapo, vespo
from covey.objective.loss import Objective

ALGORITHMS: Mapping[str, Callable[..., Objective]] = MappingProxyType(
    {
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "dapo": dapo,
        "gspo": gspo,
        "gspo_token": gspo_token,
        "gtpo": gtpo,
        "grpo_s": grpo_s,
        "gtpo_trajectory": gtpo_trajectory,
        "rloo": rloo,
        "reinforce_pp": reinforce_pp,
        "reinforce_pp_baseline": reinforce_pp_baseline,
        "lite_ppo": lite_ppo,
        "opo": opo,
        "gpg": gpg,
        "cispo": cispo,
        "gmpo": gmpo,
        "sapo": sapo,
        "clip_cov": clip_cov,
        "kl_cov": kl_cov,
        "luspo": luspo,
        "vespo": vespo,
        "dppo": dppo,
        "gigpo": gigpo,
    }
)

__all__ = [
    "ALGORITHMS",
    "Objective",
    "cispo",
    "clip_cov",
    "dapo",
    "dppo",
    "dr_grpo",
    "gigpo",
    "gmpo",
    "gpg",
    "grpo",
    "grpo_s",
    "gspo",
    "gspo_token",
    "gtpo",
    "gtpo_trajectory",
    "kl_cov",
    "lite_ppo",
    "luspo",
    "opo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "sapo",
    "vespo",
]
