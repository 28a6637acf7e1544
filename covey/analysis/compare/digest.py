"""Telling final weights, and data, apart without torch."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from covey.tasks import Task
from covey.types import Prompt

CHUNK = 2**24


def task_digest(task: Task) -> str:
    """Return the sha256 of all prompts of a task, those to train on and the held-out ones."""
    return " ".join(prompts_digest(prompts) for prompts in (task.train(), task.held_out()))


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Return the sha256 of prompts: what is asked, and what answers are judged by."""
    digest = hashlib.sha256()
    for prompt in prompts:
        messages = [dict(message) for message in prompt.messages]
        row = [prompt.id, prompt.task, messages, prompt.target, dict(prompt.info)]
        digest.update(json.dumps(row, default=str).encode() + b"\n")
    return digest.hexdigest()


def checkpoint_digest(folder: Path) -> str:
    """Return the sha256 of a checkpoint's weights: names, types, shapes and bytes, in name order.

    Those of a model, in one file or several, or of an adapter. How the tensors are spread over
    files and what else a file says does not count.
    """
    files = [*folder.glob("model*.safetensors"), *folder.glob("adapter_model.safetensors")]
    tensors = sorted(
        ((name, file, about) for file in files for name, about in _tensors(file).items()),
        key=lambda tensor: tensor[0],
    )
    digest = hashlib.sha256()
    for name, file, about in tensors:
        digest.update(f"{name} {about['dtype']} {about['shape']}\n".encode())
        begin, end = about["data_offsets"]
        with file.open("rb") as data:
            data.seek(_header_size(file) + begin)
            left = end - begin
            while left:
                part = data.read(min(CHUNK, left))
                if not part:
                    raise ValueError(f"{file} ends too early")
                digest.update(part)
                left -= len(part)
    return digest.hexdigest()


def _header_size(file: Path) -> int:
    with file.open("rb") as data:
        return 8 + int(struct.unpack("<Q", data.read(8))[0])


def _tensors(file: Path) -> dict[str, dict[str, Any]]:
    with file.open("rb") as data:
        header: dict[str, Any] = json.loads(data.read(_header_size(file))[8:])
    header.pop("__metadata__", None)
    return header
