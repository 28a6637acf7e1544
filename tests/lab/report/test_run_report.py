"""The report of one run: its numbers, its choice of texts, and that nothing in it acts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import run as command
from covey.lab.report import RunReport, headline, run_report, svg, ticks, write_run_report
from covey.records.folder import RunFolder
from tests.lab.ui.browser import Browser
from tests.lab.ui.conftest import browser as browser
from tests.lab.ui.sample_runs import HOSTILE, make_run

HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def item(number: int, success: bool, text: str = "") -> dict[str, Any]:
    return {
        "prompt_id": f"p{number}", "prompt": f"{number}?{text}", "target": "1", "completion": f"so {success}{text}",
        "success": success, "tokens": 3, "finish": "stop",
    }  # fmt: skip


def run_with_items(path: Path, text: str = "") -> RunFolder:
    run = make_run(path, steps=4, text=text)
    run.write_table("evaluations", 0, [item(n, n == 0, text) for n in range(4)])
    run.write_table("evaluations", 4, [item(n, n < 2, text) for n in range(4)])
    return run


@pytest.fixture
def report(tmp_path: Path) -> RunReport:
    return run_report(run_with_items(tmp_path / "run"))


def test_a_report_shows_what_the_run_recorded(report: RunReport) -> None:
    assert report.trends["reward"].steps == (1, 2, 3, 4)
    assert report.trends["correct"].values == report.trends["reward"].values
    assert [row[:2] for row in report.evaluations.rows] == [
        ["0", "40.0% [30.0%, 90.0%]"],
        ["4", "40.0% [30.0%, 90.0%]"],
    ]
    assert [row[3:5] for row in report.evaluations.rows] == [["12.5%", "7"]] * 2
    kinds = [(example.prompt_id, example.kind) for example in report.examples]
    assert kinds == [
        ("p1", "arms differ"),
        ("p0", "all correct"),
        ("p2", "all incorrect"),
        ("p3", "all incorrect"),
    ]
    assert report.sampled_step == 4
    assert [(row["kind"], row["reward"]) for row in report.samples] == [
        ("highest", 1.0),
        ("highest", 1.0),
        ("highest", 0.0),
    ]
    assert len({row["text"] for row in report.samples}) == 3  # each text once
    assert report.notes == []


def test_the_headline_says_when_a_gain_is_within_noise() -> None:
    def evaluation(step: int, value: float, low: float, high: float) -> dict[str, Any]:
        return {"step": step, "greedy": {"value": value, "low": low, "high": high}}

    first, clear, unclear = (
        evaluation(0, 0.1, 0.05, 0.2),
        evaluation(9, 0.6, 0.5, 0.7),
        evaluation(9, 0.2, 0.1, 0.3),
    )
    assert (
        headline([], [first, clear])
        == "Held-out accuracy went from 10.0% to 60.0% in 9 steps (+50.0 points)"
    )
    late = headline([], [{**first, "step": 4}, clear])  # an evaluation of step 0 was lost
    assert f" from step 4 to step {clear['step']} (" in late
    assert "(+10.0 points, within noise)" in headline([], [first, unclear])
    graded = [
        {**evaluation(n, 0.0, 0.0, 0.1), "reward": evaluation(n, 0.5 + n, n, n)["greedy"]}
        for n in (0, 9)
    ]
    assert (
        headline([], graded) == "Held-out mean reward went from 0.500 to 9.500 in 9 steps (+9.000)"
    )
    assert (
        headline([{"objective/scores": 0.25}, {"objective/scores": None}], [])
        == "Mean reward went from 0.25 to 0.25 in 2 steps"
    )


def test_charts_have_round_ticks_and_the_end_in_words(report: RunReport) -> None:
    assert ticks(0.13, 0.29, 4) == [0.15, 0.2, 0.25]
    assert ticks(-3.0, 20.0, 4) == [0, 10, 20]
    drawn = svg("reward", report.trends["reward"])
    assert 'aria-label="reward: 0.09063 at step 1, 0.2753 at step 4"' in drawn
    assert drawn.count("<polyline") == 1


def test_the_command_writes_the_same_files_for_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with_items(tmp_path / "run")
    assert command(["runs", "report", str(run.path)]) == 0
    assert capsys.readouterr().out.split() == [
        str(run.path / f"report.{kind}") for kind in ("html", "md", "svg")
    ]
    written = [file.read_bytes() for file in sorted(run.path.glob("report.*"))]
    assert command(["runs", "report", str(run.path)]) == 0
    assert [file.read_bytes() for file in sorted(run.path.glob("report.*"))] == written
    assert command(["runs", "report", str(tmp_path)]) != 0
    assert "is not a run" in capsys.readouterr().err


def test_a_damaged_run_still_has_a_report_that_says_what_is_missing(tmp_path: Path) -> None:
    run = run_with_items(tmp_path / "run")
    (run.path / "environment.json").write_text("{")
    with (run.path / "steps.jsonl").open("a") as file:
        file.write("not json\n")
    (run.path / "rollouts/000004.jsonl").write_text('{"prompt": 1}\n')
    write_run_report(run, run.path)
    page = (run.path / "report.html").read_text()
    for words in (
        "environment.json cannot be read",
        "steps.jsonl line 5 cannot be read",
        "000004.jsonl line 1 cannot be read",
    ):
        assert words in page
    assert "reward: 0.09063 at step 1" in page


def test_nothing_that_a_model_wrote_acts_or_hides_in_a_report(
    browser: Browser, tmp_path: Path
) -> None:
    run = run_with_items(tmp_path / "run", HOSTILE + "x" * 1_000_000)
    files = write_run_report(run, run.path)
    for file in files:
        text = file.read_text()
        assert len(text) < 200_000  # of many megabytes
        assert HIDDEN.findall(text) == []
        assert "<script" not in re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    browser.open(files[0].as_uri())
    browser.wait("document.readyState === 'complete' && document.body.innerText.length > 100")
    shown = browser.run("document.body.innerText")
    assert "<script>window.hacked=1</script>" in shown
    assert "more characters" in shown
    assert "\\u202egnp.exe" in shown
    assert browser.run(
        "window.hacked === undefined && document.querySelectorAll('img, script, b').length === 0"
    )
    assert browser.problems() == []


def test_markdown_keeps_what_a_model_wrote_inside_its_fence(tmp_path: Path) -> None:
    run = run_with_items(tmp_path / "run", "```\n# heading\n<b>")
    write_run_report(run, run.path)
    lines = (run.path / "report.md").read_text().splitlines()
    fence, outside = "", []
    for line in lines:
        mark = re.fullmatch("`{3,}", line)
        if not fence and mark:
            fence = line
        elif fence and line == fence:
            fence = ""
        elif not fence:
            outside.append(line)
    assert fence == ""
    assert "# heading" not in outside
    assert json.dumps(outside).count("<b>") == 0
