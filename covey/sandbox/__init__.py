"""Sandboxes, which run untrusted programs and score text of models.

No module here imports torch.
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
