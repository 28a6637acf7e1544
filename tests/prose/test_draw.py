"""Drawing random sentences of the prose."""

from __future__ import annotations

from pathlib import Path

from tests.prose.draw import Sentence, draw, prose, sources


def test_every_source_has_its_share_and_the_seed_decides() -> None:
    drawn = draw(count=60, seed=0)
    assert len(set(drawn)) == 60
    shares = [set(found) & set(drawn) for found in sources().values()]
    assert all(len(share) >= 15 for share in shares)
    assert draw(count=60, seed=0) == drawn
    assert set(draw(count=60, seed=1)) != set(drawn)


def test_sentences_are_found_without_headings_tables_and_code() -> None:
    text = """# A heading of four words

One sentence over two
lines. Another one of five words.

| a | table of several words here |

```
code in a fence, which is long
```
- An item of several words.
"""
    assert list(prose(text, Path("page.md"))) == [
        Sentence("One sentence over two lines.", "page.md:3"),
        Sentence("Another one of five words.", "page.md:3"),
        Sentence("An item of several words.", "page.md:11"),
    ]
