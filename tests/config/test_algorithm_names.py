"""The names of algorithms that are checked before torch is imported."""

from __future__ import annotations

from covey.config.algorithm_names import ALGORITHM_NAMES, COMPOSED
from covey.objective import ALGORITHMS
from covey.objective.build import COMPOSED as BUILT


def test_the_names_are_those_of_the_algorithms() -> None:
    assert tuple(ALGORITHMS) == ALGORITHM_NAMES
    assert BUILT == COMPOSED
