"""Token counts of prompts and solutions.

A tokenizer needs transformers, which takes a second to import. Nothing else in a plan needs
transformers. `covey plan` therefore counts tokens in a separate process, and reads the task at the
same time. This module does not import torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from covey.errors import CoveyError
from covey.models.chat_template import Template, make_renderer
from covey.models.template_process import start_rendering
from covey.subprocesses import module_command

UNREADABLE = (CoveyError, OSError, ValueError, KeyError, ImportError)
"""Errors while reading data or a tokenizer, after which the plan continues without token counts."""

Job = Mapping[str, Any]
"""The keys of a job are the tokenizer's `path`, `source` and `options`, the chat `template`, and
the inputs `solutions` (texts) and `prompts` (lists of messages).
"""
Measure = Callable[[Job], Mapping[str, Any]]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def measure(job: Job) -> Mapping[str, Any]:
    """Return token counts of `solutions` and `prompts`; `problem` says why counts are missing."""
    found: dict[str, Any] = {}
    try:
        tokenizer = _tokenizer(job["source"], job["options"])
        found["solutions"] = [
            len(tokenizer.encode(text, add_special_tokens=False)) for text in job["solutions"]
        ]
        renderer = make_renderer(tokenizer, Template(**job["template"]), job["path"])
        found["prompts"] = [len(renderer.tokens(messages)) for messages in job["prompts"]]
        found["context"] = _context(job["source"])
    except UNREADABLE as error:
        found["problem"] = first_line(error)
    return found


def _context(source: str) -> int | None:
    """Return the model's context length; None if only the weights file states it."""
    from transformers.utils.hub import cached_file

    file = cached_file(source, "config.json", _raise_exceptions_for_missing_entries=False)
    if file is None:
        return None
    data = json.loads(Path(file).read_text(encoding="utf-8"))
    length: int | None = data.get("max_position_embeddings") or data.get("n_positions")
    return length


def _tokenizer(source: str, options: Mapping[str, str]) -> Any:
    from transformers.utils.hub import cached_file

    plain = {"_raise_exceptions_for_missing_entries": False}
    if options or not cached_file(source, "tokenizer.json", **plain):
        from covey.models.from_pretrained import read_tokenizer

        return read_tokenizer(source, **options)
    # AutoTokenizer imports transformers' model code, which takes two seconds.
    from transformers import TokenizersBackend

    return TokenizersBackend.from_pretrained(source, trust_remote_code=False)


def measuring() -> AbstractContextManager[Measure]:
    """Return a context manager that yields `measure`, which may run in another process."""
    return nullcontext(measure) if "transformers" in sys.modules else measuring_elsewhere()


@contextmanager
def measuring_elsewhere() -> Iterator[Measure]:
    """Start a process that imports transformers; yield a function that calls `measure` in it."""
    process = subprocess.Popen(
        module_command("covey.analysis.plan.prompt_lengths"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )

    def ask(job: Job) -> Mapping[str, Any]:
        reply, _ = process.communicate(json.dumps(job, default=str).encode())
        return json.loads(reply) if reply else {"problem": "the process that measures it failed"}

    try:
        yield ask
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """Read one job from standard input, and write its token counts to standard output."""
    start_rendering()
    import transformers.utils.chat_template_utils

    transformers.utils.logging.set_verbosity_error()  # it warns of long prompts; the plan reports
    job = json.loads(sys.stdin.buffer.read())
    sys.stdout.write(json.dumps(measure(job)))


if __name__ == "__main__":
    main()
