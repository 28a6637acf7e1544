from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import build
from tests.reference.servers import SMALL, Server, new_process


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The embedded model behind a token, with small limits."""
    with new_process("embedded", *SMALL) as server:
        yield server


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random Qwen2 on disk."""
    folder = tmp_path_factory.mktemp("models") / "qwen"
    model = build("qwen2")
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return str(folder)
