"""The factor that lowers the reward of padded, repetitive or incoherent completions."""

from __future__ import annotations

from covey.rewards.coherence import coherence
from covey.rewards.efficiency import repetition
from covey.rewards.text import count_words, tag_contents

MANY_WORDS, MANY_CALLS = 1000, 8
"""More than MANY_WORDS words or MANY_CALLS tool calls lower the reward of a completion."""


def robust_factor(text: str) -> float:
    """Return a factor for a completion's reward, which is 1 without signs of reward hacking.

    The factor is multiplied by 0.5 for thinking that is not language, by 0.5 for text that mostly
    repeats itself, and by 0.7 for more than 1,000 words. For more than 8 tool calls, the factor is
    multiplied by `max(0.5, 1 - 0.05 * (calls - 8))`.
    """
    factor = 1.0
    thinking: list[str] = []
    for tag in ("think", "reasoning"):
        before, closing, _ = text.partition(f"</{tag}>")
        if closing and f"<{tag}>" not in before:  # the opening tag may be part of the prompt
            thinking.append(before)
        thinking += tag_contents(text, tag)
    if thinking and coherence(" ".join(thinking)) < 0.5:
        factor *= 0.5
    if repetition(text, above=0.5) > 0.5:
        factor *= 0.5
    if len(text) > MANY_WORDS and count_words(text) > MANY_WORDS:
        factor *= 0.7
    calls = text.count("<tool_call>")
    if calls > MANY_CALLS:
        factor *= max(0.5, 1.0 - 0.05 * (calls - MANY_CALLS))
    return factor
