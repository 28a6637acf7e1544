"""Sandboxes that run untrusted programs and that score completions.

No module of this package imports torch.
"""

from covey.sandbox.limits import Case, Limits, Outcome
from covey.sandbox.program import require_isolation, run_program
from covey.sandbox.values import matches, read_expected, same_output

__all__ = [
    "Case",
    "Limits",
    "Outcome",
    "matches",
    "read_expected",
    "require_isolation",
    "run_program",
    "same_output",
]
