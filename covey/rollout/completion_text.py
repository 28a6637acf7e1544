"""The texts of completions. Some engines decode the text during generation."""

from __future__ import annotations

from collections.abc import Sequence

from covey.engines.protocol import Completion
from covey.models.language_model import LanguageModel


def completion_texts(model: LanguageModel, completions: Sequence[Completion]) -> list[str]:
    """Return the text of each completion; decode completions that the engine has not decoded."""
    rest = iter(model.decode_many([c.tokens for c in completions if c.text is None]))
    return [next(rest) if c.text is None else c.text for c in completions]
