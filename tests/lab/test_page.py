from __future__ import annotations

import base64
import hashlib
import json
import math
import re

import pytest

from covey.lab.page import embedded_json, script, security_policy
from covey.records.files import finite

EVIL = "</pre><script>alert(1)</script><img src=x onerror='alert(2)'>&\""


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
