"""The garbage collector during training."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from covey import garbage
from covey.garbage import freeze_garbage_collector


class Knot:
    """Something that holds itself."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what conftest.py froze, for the time of a test."""
    monkeypatch.setattr(garbage, "_frozen", False)
    gc.unfreeze()
    yield
    gc.freeze()


def test_old_objects_are_left_alone_until_the_end_and_no_longer() -> None:
    assert gc.get_freeze_count() == 0
    with freeze_garbage_collector():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_what_the_caller_froze_stays_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with freeze_garbage_collector():
        made = [[] for _ in range(1000)]
        assert gc.get_freeze_count() <= before
    assert gc.get_freeze_count() > before - 1000
    assert len(made) == 1000


def test_what_is_made_meanwhile_is_collected() -> None:
    with freeze_garbage_collector():
        seen = weakref.ref(Knot())
        gc.collect()
        assert seen() is None


def test_what_is_garbage_already_does_not_stay() -> None:
    seen = weakref.ref(Knot())
    with freeze_garbage_collector():
        assert seen() is None
