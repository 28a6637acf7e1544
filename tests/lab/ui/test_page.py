"""The page in real Chromium: what a person sees and does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from covey.lab.ui.server import Server
from tests.lab.ui.browser import Browser
from tests.lab.ui.sample_runs import HOSTILE, add_step, make_run

Serve = Callable[..., Server]
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
LABEL = "document.querySelector('canvas[aria-label^=\"objective/scores\"]')?.getAttribute('aria-label') ?? ''"


def text_of(page: Browser, selector: str = "body") -> str:
    return page.run(f"document.querySelector({json.dumps(selector)}).innerText")


def test_a_step_that_is_added_appears_by_itself(
    browser: Browser, serve: Serve, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "runs/one", steps=4)
    browser.open(serve(tmp_path / "runs").url)
    browser.wait("document.body.innerText.includes('step 4 / 20')")
    before = browser.wait(LABEL)
    assert "0.2753" in before  # 0.5 (1 - exp(-4/5))
    add_step(run, 5, level=0.25)
    browser.wait("document.body.innerText.includes('step 5 / 20')")
    browser.wait(f"({LABEL}).includes('0.5661')")
    assert "held-out accuracy" in text_of(browser, ".panels")
    assert browser.problems() == []


def test_groups_are_browsed_filtered_and_read_token_by_token(
    browser: Browser, serve: Serve, tmp_path: Path
) -> None:
    make_run(tmp_path / "one", steps=2)
    browser.open(f"{serve(tmp_path).url}#view=groups")
    browser.wait("document.querySelectorAll('.group').length === 3")
    browser.press("[")  # the step before
    browser.wait("document.querySelector('#step').value === '1'")
    browser.run("location.hash = '#view=groups&filter=mixed'")
    browser.wait("document.querySelectorAll('.group').length === 2")
    browser.run("location.hash = '#view=groups&q=2%2B2'")
    browser.wait("document.querySelectorAll('.group').length === 1")
    browser.run("location.hash = '#view=groups'")
    browser.wait("document.querySelectorAll('.group').length === 3")
    browser.press("j")  # the first group opens
    browser.wait("document.querySelectorAll('.rollout').length === 4")
    shown = text_of(browser, ".rollout")
    for words in (
        "✓ correct",
        "reward 1",
        "advantage 1",
        "5 tokens, stop",
        "correct 1",
        "<answer>1</answer>",
    ):
        assert words in shown
    browser.click(".rollout button", "Tokens")
    browser.wait("document.querySelectorAll('.token').length === 5")
    assert browser.run("[...document.querySelectorAll('.token')].map((t) => t.classList.contains('untrained'))") == [
        False, False, True, False, False,
    ]  # fmt: skip
    assert text_of(browser, ".cells").startswith("<think>47+<eos>")
    assert "one advantage for the whole rollout" in text_of(browser, ".tokens")
    browser.run("location.hash += '&by=ratio'")
    browser.wait(
        "document.querySelector('.tokens').innerText.includes('does not record ratio of each token')"
    )
    browser.press("Escape")
    browser.wait(
        "document.querySelectorAll('.rollout').length === 4 && !document.querySelector('.split').hidden"
    )
    assert browser.problems() == []


def test_two_runs_are_overlaid_and_their_settings_compared(
    browser: Browser, serve: Serve, tmp_path: Path
) -> None:
    make_run(tmp_path / "runs/one")
    make_run(tmp_path / "runs/two", name="dapo", level=0.25)
    browser.open(f"{serve(tmp_path / 'runs').url}#run=one&run=two&smooth=0.6")
    browser.wait(f"({LABEL}).includes('one') && ({LABEL}).includes('two')")
    assert browser.wait("document.querySelectorAll('.legend li').length") == 2
    browser.press("4")
    browser.wait("document.body.innerText.includes('2 of 5 settings differ between 2 runs')")
    rows = browser.run("[...document.querySelectorAll('tr.differs')].map((r) => r.innerText)")
    assert rows == ["objective.clip_low\t0.2\t0.45", "objective.name\t'grpo'\t'dapo'"]
    assert browser.problems() == []


def test_axes_have_whole_steps_and_no_negative_share_of_zero(
    browser: Browser, serve: Serve, tmp_path: Path
) -> None:
    make_run(tmp_path / "runs/a", steps=1)
    browser.open(serve(tmp_path / "runs").url)
    script = """(async () => {
      const { Chart, ticks } = await import("/chart.js");
      const chart = new Chart({ title: "zero", percent: true });
      chart.lines = [{ x: [1, 2, 3], y: [0, 0, 0] }];
      const { y0, y1 } = chart.range();
      return JSON.stringify([ticks(1, 3, 4, 1), ticks(1, 3, 4), ticks(y0, y1, 4)]);
    })()"""
    whole, parts, shares = json.loads(browser.run(script))
    assert whole == [1, 2, 3]
    assert parts == [1, 1.5, 2, 2.5, 3]
    assert shares == [0, 0.5, 1]


def test_health_is_checked_by_another_process(
    browser: Browser, serve: Serve, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "runs/flat", steps=1)
    for step in range(2, 14):
        run.log_step(
            {"step": step, "objective/scores": 0.1, "objective/verifiable_correct_rate": 0.1}
        )
    browser.open(f"{serve(tmp_path / 'runs').url}#view=health")
    browser.wait("document.querySelectorAll('.finding').length > 0")
    assert "reward 0.1 in each of 10 steps" in text_of(browser, ".health")


def test_nothing_that_a_model_wrote_acts_or_hides(
    browser: Browser, serve: Serve, tmp_path: Path
) -> None:
    text = HOSTILE + "x" * 1_000_000
    name = "<img src=x onerror=window.hacked=1> run"
    run = make_run(tmp_path / "runs" / name, steps=1, name=HOSTILE, text=HOSTILE)
    add_step(run, 2, text=text)
    browser.open(f"{serve(tmp_path / 'runs').url}#view=groups")
    browser.wait("document.querySelectorAll('.group').length === 3")
    browser.press("j")
    browser.wait("document.querySelectorAll('.rollout').length === 4")
    assert "980,1" in text_of(browser, ".rollout")  # of more than a million characters
    browser.click(".rollout button", "Tokens")
    browser.wait("document.querySelectorAll('.token').length === 5")
    seen = text_of(browser)
    for view in ("config", "curves", "groups", "reports"):
        browser.run(f"location.hash = '#view={view}'")
        browser.run("new Promise((done) => setTimeout(done, 300))")
        seen += text_of(browser)
    assert "<script>window.hacked=1</script>" in seen
    assert "\\x1b]0;title\\x07" in seen
    assert "\\u202egnp.exe" in seen
    assert HIDDEN.findall(seen) == []
    assert browser.run(
        "window.hacked === undefined && document.querySelectorAll('img, script:not([src]), b').length === 0"
    )
    assert browser.problems() == []


def test_a_small_screen_needs_no_sideways_scrolling(
    browser: Browser, serve: Serve, tmp_path: Path
) -> None:
    make_run(tmp_path / "runs/a-run-with-quite-a-long-name-1")
    server = serve(tmp_path / "runs")
    browser.resize(390, 800)
    try:
        for view in ("curves", "groups", "config", "reports"):
            browser.open(f"{server.url}#view={view}")
            browser.wait("document.querySelector('main').innerText.length > 20")
            assert browser.run("document.documentElement.scrollWidth") <= 390, view
    finally:
        browser.resize(1280, 900)
