from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import pytest

from covey.analysis.compare.html_elements import (
    Html,
    element,
    embedded_json,
    finite,
    script,
    security_policy,
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


def test_text_is_escaped_everywhere() -> None:
    read = Reader(element("p", EVIL, element("b", EVIL), title=EVIL))
    assert read.tags == ["p", "b"]
    assert read.text == EVIL + EVIL
    assert read.attributes == [("title", EVIL)]
    made = Reader(table(EVIL, [EVIL, "b"], [[EVIL, EVIL]], note=EVIL))
    assert {"script", "img", "pre"}.isdisjoint(made.tags)
    assert made.text.count(EVIL) == 5


def test_html_is_not_escaped_again() -> None:
    assert element("p", Html("<b>x</b>"), "<") == "<p><b>x</b>&lt;</p>"


def test_embedded_json_cannot_end_its_element_and_parses() -> None:
    data = {"name": EVIL, "comment": "<!-- <script>"}
    written = embedded_json(data, "d")
    inside = re.fullmatch(r'<script type="application/json" id="d">(.*)</script>', written)
    assert inside is not None
    assert "<" not in inside.group(1)
    assert json.loads(inside.group(1)) == data


def test_script_that_would_end_early_fails() -> None:
    with pytest.raises(AssertionError):
        script("let x = '</SCRIPT>'")


def test_security_policy_runs_only_given_scripts_and_loads_nothing() -> None:
    rule = security_policy(["let a = 1;"])
    digest = base64.b64encode(hashlib.sha256(b"let a = 1;").digest()).decode()
    assert f"script-src 'sha256-{digest}'" in rule
    assert "default-src 'none'" in rule
    assert "script-src 'none'" in security_policy([])


def test_nonfinite_numbers_become_null_at_any_depth() -> None:
    found = finite({"a": [1.0, math.nan, (math.inf, {"b": -math.inf})], 2: "nan", "c": True})
    assert found == {"a": [1.0, None, [None, {"b": None}]], "2": "nan", "c": True}
