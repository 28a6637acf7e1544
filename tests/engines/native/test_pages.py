from __future__ import annotations

import numpy as np
import pytest

from covey.engines.native.shared_prompt_cache import (
    Pages,
    slots_by_prompt,
    slots_together,
)
from covey.engines.native.sizes import page_for


@pytest.mark.parametrize(
    ("capacity", "page"), [(1, 16), (16, 16), (17, 32), (36, 64), (128, 128), (16_384, 128)]
)
def test_short_completions_have_small_pages(capacity: int, page: int) -> None:
    assert page_for(capacity) == page


def test_pages_follow_the_lengths_of_completions() -> None:
    pages = Pages(5, 3, 16)
    first = pages.reserve(np.array([0, 2]), np.array([16, 17]))
    assert first is not None
    assert first[:, :2].tolist() == [[0, 0], [2, 0], [2, 1]]
    assert sorted(first[:, 2].tolist() + pages.free) == list(range(5))  # each page has one owner
    again = pages.reserve(np.array([0, 2]), np.array([16, 32]))
    assert again is not None
    assert len(again) == 0
    # Too few pages for all: nothing changes.
    assert pages.reserve(np.array([0, 1, 2]), np.array([17, 1, 33])) is None
    assert (pages.owned.tolist(), len(pages.free)) == ([1, 0, 2], 2)
    # Of two free pages, each of the two completions in progress may need one.
    assert pages.admits(np.array([16])) == 0
    pages.release([0])
    assert pages.admits(np.array([16, 16])) == 1
    pages.keep([2])
    assert pages.of_slot[0] == first[1:, 2].tolist()
    assert (pages.owned.tolist(), len(pages.free)) == ([2, 0, 0], 3)


def test_slots_with_the_same_prompt_are_read_together() -> None:
    rows = np.array([4, -1, 2, 4, 2, 4, -1, 7, *[4] * 7])
    assert slots_by_prompt(rows, 8)[:5].tolist() == [
        [1, 6, -1, -1, -1, -1, -1, -1],  # free slots
        [2, 4, -1, -1, -1, -1, -1, -1],
        [0, 3, 5, 8, 9, 10, 11, 12],
        [13, 14, -1, -1, -1, -1, -1, -1],
        [7, -1, -1, -1, -1, -1, -1, -1],
    ]
    assert slots_by_prompt(np.full(3, -1), 2).tolist() == [[0, 1], [2, -1], [-1, -1]]


def test_query_heads_of_slots_fill_sixteen_rows() -> None:
    assert [slots_together(n) for n in (1, 2, 3, 4, 5, 7, 8, 9, 64)] == [16, 8, 4, 4, 2, 2, 2, 1, 1]
