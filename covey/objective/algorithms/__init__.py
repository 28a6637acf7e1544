"""The registry of algorithms: each algorithm is a function that returns an objective.

The docstring of an algorithm gives the paper, the loss formula, and Covey's departures from the
paper. The decorator `takes` names the algorithm's options. To add an algorithm, write its function,
add the function to this registry, and add its title to `covey/config/algorithm_names.py`. Add a
test under tests/objective that compares the algorithm's loss with a number worked out by hand. Run
`make docs` to write the algorithm's page.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from covey.objective.algorithms import (
    clipped,
    distillation,
    dpo,
    grouped,
    off_policy,
    ppo,
    sequence,
    token,
    weighted,
)
from covey.objective.loss import Objective

ALGORITHMS: Mapping[str, Callable[..., Objective]] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            clipped.grpo,
            clipped.dr_grpo,
            clipped.dapo,
            sequence.gspo,
            sequence.gspo_token,
            token.gtpo,
            sequence.grpo_s,
            token.gtpo_trajectory,
            sequence.rloo,
            clipped.reinforce_pp,
            clipped.reinforce_pp_baseline,
            clipped.lite_ppo,
            clipped.opo,
            weighted.gpg,
            weighted.cispo,
            sequence.gmpo,
            weighted.sapo,
            token.clip_cov,
            token.kl_cov,
            sequence.luspo,
            weighted.vespo,
            weighted.dppo,
            grouped.gdpo,
            grouped.maxrl,
            grouped.pkpo,
            grouped.gfpo,
            grouped.scalerl,
            off_policy.bapo,
            off_policy.m2po,
            off_policy.decoupled_ppo,
            distillation.opd,
            distillation.sdpo,
            grouped.gigpo,
            ppo.ppo,
            dpo.dpo,
            dpo.ipo,
        )
    }
)

__all__ = ["ALGORITHMS", "Objective"]
