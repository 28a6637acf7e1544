"""The text of each token of a rollout, from the tokenizer that a run saved with its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from covey.embedded import MODELS
from covey.run.folder import RunFolder

FILE = "tokenizer.json"


def token_texts(
    run: RunFolder, settings: dict[str, Any], tokens: Sequence[int]
) -> list[str] | None:
    """Return the text of each token; None if the run has no readable tokenizer."""
    for path in _tokenizers(run, settings):
        tokenizer = _loaded(str(path), path.stat().st_mtime_ns)
        if tokenizer is not None:
            return [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
    return None


def _tokenizers(run: RunFolder, settings: dict[str, Any]) -> Iterator[Path]:
    model = settings.get("model")
    named = model.get("path") if isinstance(model, dict) else None
    folders = [folder for _, folder in reversed(run.checkpoints())]
    if isinstance(named, str) and named:
        folders.append(MODELS.get(named, Path(named)))
    yield from (folder / FILE for folder in folders if (folder / FILE).is_file())


@lru_cache(maxsize=4)
def _loaded(path: str, changed: int) -> Any:
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(path)
    except Exception:  # the library raises plain Exception for a file that it cannot read
        return None
