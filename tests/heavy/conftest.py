"""One native run, beside which the others stand."""

from __future__ import annotations

import pytest

from tests.heavy.runs import Run


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run with the native engine."""
    run = Run(tmp_path_factory.mktemp("native") / "run")
    assert run.end() == 0, run.text()
    return run
