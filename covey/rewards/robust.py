"""What makes gaming a reward not worth it, whatever the reward."""

from __future__ import annotations

from covey.rewards.coherence import coherence
from covey.rewards.efficiency import repetition
from covey.rewards.text import count_words, inside

LONG, MANY_CALLS = 1000, 8
"""Words and tool calls that no honest answer needs."""


def _thinking(text: str, tag: str) -> list[str]:
    """Return all thinking; the prompt may have ended with the tag that begins it."""
    before, closing, _ = text.partition(f"</{tag}>")
    begun = [before] if closing and f"<{tag}>" not in before else []
    return [*begun, *inside(text, tag)]


def robust_factor(text: str) -> float:
    """Return what an answer's reward is multiplied by: 1 for an honest one.

    0.5 for thinking that is not language, 0.5 for text that mostly repeats itself, 0.7 for more
    than 1,000 words, and 1 - 0.05 for each tool call above 8, down to 0.5.
    """
    factor = 1.0
    thinking = [t for tag in ("think", "reasoning") for t in _thinking(text, tag)]
    if thinking and coherence(" ".join(thinking)) < 0.5:
        factor *= 0.5
    if repetition(text, above=0.5) > 0.5:
        factor *= 0.5
    if len(text) > LONG and count_words(text) > LONG:
        factor *= 0.7
    calls = text.count("<tool_call>")
    if calls > MANY_CALLS:
        factor *= max(0.5, 1.0 - 0.05 * (calls - MANY_CALLS))
    return factor
