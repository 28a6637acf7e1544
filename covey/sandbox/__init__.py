"""Running programs that nobody trusts. No torch here."""

from covey.sandbox.limits import Case, Limits, Outcome
from covey.sandbox.run import require_isolation, run
from covey.sandbox.values import matches, read_expected, same_output

__all__ = [
    "Case",
    "Limits",
    "Outcome",
    "matches",
    "read_expected",
    "require_isolation",
    "run",
    "same_output",
]
