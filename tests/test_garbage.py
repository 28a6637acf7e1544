import gc
import weakref

from covey.training.garbage import freeze_garbage_collector


class Knot:
    """Something that holds itself."""

    def __init__(self) -> None:
        self.self = self


def test_old_objects_are_left_alone_until_the_end_and_no_longer() -> None:
    before = gc.get_freeze_count()
    with freeze_garbage_collector():
        assert gc.get_freeze_count() > before + 10_000
    assert gc.get_freeze_count() == 0


def test_what_is_made_meanwhile_is_collected() -> None:
    with freeze_garbage_collector():
        seen = weakref.ref(Knot())
        gc.collect()
        assert seen() is None


def test_what_is_garbage_already_does_not_stay() -> None:
    seen = weakref.ref(Knot())
    with freeze_garbage_collector():
        assert seen() is None
