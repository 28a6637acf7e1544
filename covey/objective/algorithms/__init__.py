"""The registry of algorithms: each algorithm is a function that returns an objective.

The keyword arguments of an algorithm are its options, with their defaults. The decorator
`algorithm` names the paper; the docstring gives the loss formula, and Covey's departures from the
paper. To add an algorithm, write its function and name it in the dict `FAMILY` at the end of its
file. Add a test under tests/objective that compares the algorithm's loss with a number worked out
by hand. Run `make docs` to write the algorithm's page.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from covey.objective.algorithms import (
    clipped,
    distillation,
    dpo,
    entropy,
    grouped,
    marked,
    ppo,
    sequence,
    turns,
    weighted,
)
from covey.objective.loss import Objective

ALGORITHMS: Mapping[str, Callable[..., Objective]] = MappingProxyType(
    {
        **clipped.FAMILY,
        **distillation.FAMILY,
        **dpo.FAMILY,
        **entropy.FAMILY,
        **grouped.FAMILY,
        **marked.FAMILY,
        **ppo.FAMILY,
        **sequence.FAMILY,
        **turns.FAMILY,
        **weighted.FAMILY,
    }
)

__all__ = ["ALGORITHMS", "Objective"]
