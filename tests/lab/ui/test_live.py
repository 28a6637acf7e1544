"""A real run, watched while it trains: its steps, groups, tokens and the step explorer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from covey.cli.main import run as covey
from covey.lab.ui.server import Server
from tests.lab.ui.browser import Browser
from tests.processes import Forked

SETTINGS = ("train.steps=3", "rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_tokens=32",
            "evaluate.prompts=4", "save.every=1", "model.device=cpu")  # fmt: skip


@pytest.mark.slow
def test_a_run_is_watched_and_explained_while_it_trains(
    browser: Browser, serve: Callable[..., Server], tmp_path: Path
) -> None:
    server = serve(tmp_path)
    browser.open(server.url)
    browser.wait("document.body.innerText.includes('There are no runs')")
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    arguments = ["train", "--run", str(tmp_path / "live"), *words]
    training = Forked(lambda: covey(arguments), tmp_path.with_suffix(".log"))
    browser.wait("document.body.innerText.includes('● live')", 180)
    browser.wait("document.querySelectorAll('.panel').length > 5", 60)
    assert training.wait(timeout=180) == 0
    browser.wait("document.body.innerText.includes('step 3 / 3')")
    browser.press("2")
    browser.wait("document.querySelectorAll('.group').length === 2")
    browser.press("j")
    browser.click(".rollout button", "Tokens")
    browser.click("#again")  # covey explain, in another process
    browser.wait("document.body.innerText.includes('the step was trained again')", 180)
    browser.run("location.hash += '&by=ratio'")
    browser.wait("document.querySelector('.tokens select')?.value === 'ratio'")
    facts = browser.run(
        "document.querySelector('.token').dispatchEvent(new PointerEvent('pointerover', {bubbles: true})), document.querySelector('.facts').innerText"
    )
    for name in ("probability", "advantage", "ratio", "entropy", "gradient"):
        assert name in facts
    browser.press("6")
    browser.wait("document.querySelectorAll('.step-token').length === 33", 180)
    gradient = (
        "[...document.querySelectorAll('.step-token')].map((t) => Number(t.dataset.gradient))"
    )
    before = browser.run(gradient)
    browser.run(
        "(() => { const r = document.querySelector('.reward input'); r.value = 0; r.dispatchEvent(new Event('input')); })()"
    )
    browser.wait(f"{gradient}[0] >= 0")  # the first completion no longer beats its group
    assert before[1] < 0
    assert browser.problems() == []
