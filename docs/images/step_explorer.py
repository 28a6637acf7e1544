"""Make docs/step-explorer.html: the step explorer of `covey ui` with a table of answers.

    python docs/images/step_explorer.py docs/step-explorer.html

The page has the explorer's own script. Its answers are computed by the objective code that trains.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.lab.explain.effect import option_defaults, small_step
from covey.lab.page import security_policy, style_sheet
from covey.lab.ui.server import static_file

LENGTHS = (4, 8, 6, 5, 7, 3)
CHOICES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "algorithm": (
        "Algorithm",
        {name: name for name in ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "cispo")},
    ),
    "rewards": (
        "Rewards",
        {
            "1,0,0,1,0,0": "two of six correct",
            "1,0,0,0,0,0": "one of six correct",
            "1,0.8,0.6,0.4,0.2,0": "graded",
            "1,1,1,1,1,1": "all equal",
        },
    ),
    "drift": (
        "Policy moved since sampling",
        {"0.3": "by up to 0.3 nats", "0": "not at all", "0.8": "by up to 0.8 nats"},
    ),
    "clip": ("Clip range", {"1": "the algorithm's own", "0.5": "half of it", "2": "twice as wide"}),
}
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">{policy}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Step explorer</title><style>{style}
body {{ display: block; padding: 1rem 1.4rem 3rem; }}</style></head><body>
<h1>Step explorer</h1>
<div id="explorer"></div>
<p class="quiet">This page has a table of answers. <code>covey ui</code> computes any group size,
rewards and options.</p>
<script type="application/json" id="table">{table}</script><script type="module">{script}</script>
</body></html>
"""
START = """
const table = JSON.parse(byId("table").textContent);
const page = new Explorer(async (query) => table.answers[Object.values(query).join("|")],
  table.choices);
byId("explorer").append(page.node);
page.show();
"""


def question(algorithm: str, rewards: str, drift: str, clip: str) -> dict[str, Any]:
    """Return what the explorer is asked for one choice of each."""
    defaults = option_defaults(algorithm)
    clips = {
        name: value * float(clip) for name, value in defaults.items() if name.startswith("clip")
    }
    lengths = ",".join(map(str, LENGTHS))
    return {"algorithm": algorithm, "rewards": rewards, "lengths": lengths, "drift": drift, **clips}


def answers() -> dict[str, Any]:
    """Return the answer to every choice."""
    choices = [list(texts) for _, texts in CHOICES.values()]
    return {
        "|".join(chosen): rounded(small_step(question(*chosen)))
        for chosen in itertools.product(*choices)
    }


def rounded(value: Any) -> Any:
    """Return plain data with nine digits of each number, which identify a float32."""
    # The page rounds what it shows; fewer digits here would round twice.
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def script() -> str:
    """Return the scripts of the explorer as one module."""
    sources = [static_file(name) or b"" for name in ("dom.js", "explorer.js")]
    joined = "\n".join(source.decode() for source in sources) + START
    lines = [line for line in joined.splitlines() if not line.startswith("import ")]
    return re.sub(r"^export ", "", "\n".join(lines), flags=re.MULTILINE)


def page(made: Mapping[str, Any]) -> str:
    """Return the page with a table of answers."""
    choices = {
        name: {"label": label, "choices": list(texts.items())}
        for name, (label, texts) in CHOICES.items()
    }
    table = json.dumps({"choices": choices, "answers": made}, separators=(",", ":"))
    style = str(style_sheet()) + (static_file("style.css") or b"").decode()
    return PAGE.format(
        policy=security_policy([script()]), style=style, table=table, script=script()
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(answers()), encoding="utf-8")
