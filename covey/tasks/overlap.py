"""Finds held-out prompts that are also training prompts; evaluations on them measure
memorization."""

from __future__ import annotations

from collections.abc import Sequence

from covey.types import Prompt


def shared_prompts(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[Prompt]:
    """Return the held-out prompts whose text equals the text of a training prompt."""
    texts = {compared_text(prompt) for prompt in train}
    return [prompt for prompt in held_out if compared_text(prompt) in texts]


def compared_text(prompt: Prompt) -> str:
    """Return the text of all messages, with whitespace and case normalised."""
    return " ".join(" ".join(m["content"] for m in prompt.messages).casefold().split())
