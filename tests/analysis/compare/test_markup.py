from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import pytest

from covey.analysis.compare.markup import (
    Html,
    element,
    embedded_json,
    finite,
    policy,
    script,
    table,
)

EVIL = "</pre><script>alert(1)</script><img src=x onerror='alert(2)'>&\""


class Reader(HTMLParser):
    """Collect elements and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_is_escaped_wherever_it_is_put() -> None:
    read = Reader(element("p", EVIL, element("b", EVIL), title=EVIL))
    assert read.tags == ["p", "b"]
    assert read.text == EVIL + EVIL
    assert read.attributes == [("title", EVIL)]
    made = Reader(table(EVIL, [EVIL, "b"], [[EVIL, EVIL]], note=EVIL))
    assert {"script", "img", "pre"}.isdisjoint(made.tags)
    assert made.text.count(EVIL) == 5


def test_markup_is_put_in_as_it_is_and_once() -> None:
    assert element("p", Html("<b>x</b>"), "<") == "<p><b>x</b>&lt;</p>"


def test_data_in_a_page_cannot_end_its_element_and_reads_back() -> None:
    data = {"name": EVIL, "comment": "<!-- <script>"}
    written = embedded_json(data, "d")
    inside = re.fullmatch(r'<script type="application/json" id="d">(.*)</script>', written)
    assert inside is not None
    assert "<" not in inside.group(1)
    assert json.loads(inside.group(1)) == data


def test_a_script_that_would_end_early_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        script("let x = '</SCRIPT>'")


def test_the_policy_lets_run_what_it_is_told_and_load_nothing() -> None:
    rule = policy(["let a = 1;"])
    digest = base64.b64encode(hashlib.sha256(b"let a = 1;").digest()).decode()
    assert f"script-src 'sha256-{digest}'" in rule
    assert "default-src 'none'" in rule
    assert "script-src 'none'" in policy([])


def test_what_json_does_not_know_becomes_null_at_any_depth() -> None:
    found = finite({"a": [1.0, math.nan, (math.inf, {"b": -math.inf})], 2: "nan", "c": True})
    assert found == {"a": [1.0, None, [None, {"b": None}]], "2": "nan", "c": True}
