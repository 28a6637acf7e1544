from __future__ import annotations

import io
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from covey.errors import DiskError
from covey.lab.compare import report
from covey.lab.compare.report import (
    MISSING,
    SCHEMA,
    ReportContents,
    markdown,
    page,
    report_contents,
    report_data,
    terminal_report,
    write_reports,
)
from covey.lab.compare.tables import (
    p_value,
    pair_summaries,
    pair_table,
    points,
    result_table,
    speed_table,
    training_table,
)
from covey.lab.page import fenced, page_file, plain
from tests.lab.compare import sample_comparison as sample

# Attributes by which a page may load something.
LOADING = {
    "src",
    "srcset",
    "href",
    "data",
    "poster",
    "action",
    "formaction",
    "background",
    "xlink:href",
}


@pytest.fixture
def contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReportContents:
    monkeypatch.setattr(report, "conclude", lambda comparison: sample.conclusion())
    return report_contents(sample.fill(tmp_path), sample.comparison())


@pytest.fixture
def no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)


class Page(HTMLParser):
    """What a browser makes of a page, as far as it matters here."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and not {"script", "style"}.intersection(self.open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def check_page(text: str) -> Page:
    read = Page(text)
    assert read.open == []
    loads = [v for _, attrs in read.tags for k, v in attrs.items() if k in LOADING]
    assert [value for value in loads if not (value or "").startswith("#")] == []
    assert not [k for _, attrs in read.tags for k in attrs if k.startswith("on")]
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    assert not re.search(r"url\(|@import", style.group(1))
    names = [attrs["id"] for _, attrs in read.tags if "id" in attrs]
    assert len(names) == len(set(names))
    assert {
        (v or "#")[1:] for _, attrs in read.tags for k, v in attrs.items() if k == "href"
    } <= set(names)
    return read


@pytest.mark.usefixtures("no_plotly")
def test_page_without_plotly_has_tables_and_names_the_extra(contents: ReportContents) -> None:
    read = check_page(page(contents))
    assert [tag for tag, _ in read.tags if tag in ("script", "img")] == []
    assert MISSING in read.text
    assert "First and last of each metric" in read.text
    for text in (
        "Cannot tell grpo and <b> apart",  # headline
        "about 7 seeds would be needed",
        "+83.3", "[+47.5, +100.0]",  # improvement of grpo
        "[-12.3, +98.7]", "0.084",  # the pair
        "12,500 tokens, 6 s", "not reached", "1 of 2 seeds",
        "the checkpoints do not differ",
        "killed <by> signal 9",
        "<b> is the same as grpo (grpo, <b>)", "train.mini_batches = 4",
        "objective.clip_low", "0.0003", "(no such option)",
        "covey compare small --algorithms grpo,<b>",
        'name = "<common>"',
        "2 arms, 3 seeds each, 20,000 tokens per run",
    ):  # fmt: skip
        assert text in read.text


@pytest.mark.usefixtures("no_plotly")
@pytest.mark.parametrize(
    ("headline", "shown"),
    [
        ("No run has finished: nothing is known.", ["No run has finished:", "nothing is known."]),
        ("None is best: a beats b. So.", ["None is best:", "a beats b. So."]),
        ("The arms are alike. The most is +1.0.", ["The arms are alike.", "The most is +1.0."]),
        ("a.b and c:d are the same.", ["a.b and c:d are the same."]),
    ],
)
def test_headline_is_split_without_changing_its_text(
    contents: ReportContents, headline: str, shown: list[str]
) -> None:
    read = check_page(
        page(replace(contents, conclusion=replace(contents.conclusion, headline=headline)))
    )
    after = read.texts.index("small: which is better?") + 1
    assert read.texts[after : after + len(shown)] == shown


@pytest.mark.usefixtures("no_plotly")
def test_one_seed_is_singular(contents: ReportContents) -> None:
    alone = replace(contents.comparison, seeds=(1,))
    assert (
        "2 arms, 1 seed each, 20,000" in check_page(page(replace(contents, comparison=alone))).text
    )


def test_a_comparison_without_evaluations_has_no_empty_chart(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    read = check_page(page(report_contents(tmp_path, sample.comparison(runs=()))))
    assert "No run has been evaluated yet." in read.text
    assert [
        tag for tag, attrs in read.tags if tag == "input" or "chart" in attrs.get("class", "")
    ] == []
    # The program draws the other charts all the same.
    assert 'if (!document.getElementById("chart-curves")) return;' in page_file("comparison.js")


def test_long_name_wraps_on_a_narrow_screen() -> None:
    narrow = page_file("report.css").partition("@media (max-width: 40rem) {")[2].partition("\n}")[0]
    (rule,) = re.findall(r"tbody th \{(.*?)\}", narrow)
    assert {"white-space: normal", "overflow-wrap: anywhere", "max-width: 40vw"} <= {
        part.strip() for part in rule.split(";")
    }


@pytest.mark.usefixtures("no_plotly")
def test_completions_are_shown_side_by_side_and_escaped(contents: ReportContents) -> None:
    read = check_page(page(contents))
    # Four prompts with seed 1: two on which the arms differ, one all correct, one all incorrect.
    assert read.texts.count(sample.EVIL) == 8
    assert read.text.count("✓ correct") == 4
    assert read.text.count("✗ incorrect") == 4
    assert "5 tokens, ended by length" in read.text


def test_charts_embed_their_scripts_and_load_nothing(contents: ReportContents) -> None:
    pytest.importorskip("plotly")
    text = page(contents)
    read = check_page(text)
    scripts = [attrs for tag, attrs in read.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "chart-data"}, {}, {}]
    assert MISSING not in read.text
    found = re.search(r'id="chart-data">(.*?)</script>', text)
    assert found is not None
    data = json.loads(found.group(1))
    assert data["arms"] == ["grpo", "<b>"]
    assert data["curves"][0]["mean"] == [0.0, 5 / 12, 10 / 12]
    assert [line["state"] for line in data["curves"][1]["lines"]] == ["done", "done", "failed"]
    assert data["health"]["reward"][0]["values"] == [0.25, 0.5]
    drawn = {attrs.get("id") for _, attrs in read.tags}
    assert {"chart-curves", "chart-health-0"} <= drawn
    axes = [attrs for tag, attrs in read.tags if tag == "input"]
    assert [a["value"] for a in axes] == list(data["axes"])
    assert [a["value"] for a in axes if "checked" in a] == ["tokens"]


def test_tables_show_the_results() -> None:
    found = sample.conclusion()
    assert result_table(found).rows == [
        ["grpo", "0.0%", "83.3%", "+83.3", "[+47.5, +100.0]", "3"],
        ["<b>", "0.0%", "37.5%", "+37.5", "by seed: +25.0, +50.0", "2"],
    ]
    assert training_table(found).rows[1] == [
        "<b>",
        "by seed: 25.0%, 50.0%",
        "37.6%",
        "12.0%",
        "1 of 2 seeds",
    ]
    assert speed_table(found).head == ["arm", "50%"]
    assert speed_table(found).rows == [["grpo", "12,500 tokens, 6 s"], ["<b>", "not reached"]]
    assert pair_table(found).rows == [["grpo - <b>", "+50.0", "[-12.3, +98.7]", "0.084", "2", "7"]]


def test_tables_without_results_have_dashes() -> None:
    found = sample.conclusion()
    nothing = dict.fromkeys(("initial", "final", "improvement", "best", "area"))
    empty = replace(found.arms[0], seeds=0, time_to_accuracy=(), **nothing)
    alone = replace(
        found.pairs[0], difference=None, p_corrected=None, decision="one seed", seeds_needed=None
    )
    none = replace(alone, mean=None, decision="nothing to compare", checkpoints=())
    unsaid = replace(found, arms=(empty, found.arms[1]), pairs=(alone, none))
    assert result_table(unsaid).rows[0] == ["grpo", "-", "-", "-", "-", "0"]
    assert training_table(unsaid).rows[0] == ["grpo", "-", "-", "-", "-"]
    assert speed_table(unsaid).rows == [["grpo", "-"], ["<b>", "not reached"]]
    assert speed_table(replace(found, arms=(empty,))).rows == []
    assert [row[1:4] + row[5:] for row in pair_table(unsaid).rows] == [
        ["+50.0", "-", "-", "at least 3"],
        ["-", "-", "-", "-"],
    ]


def test_summary_of_a_pair_does_not_repeat_the_headline() -> None:
    found = sample.conclusion()
    assert len(pair_summaries(found)) == 1
    assert pair_summaries(replace(found, headline=found.pairs[0].summary)) == []


def test_points_and_p_values_are_rounded() -> None:
    assert [points(x) for x in (0.0, -0.0, -0.0001, 0.1234, -1.0)] == [
        "0.0",
        "0.0",
        "0.0",
        "+12.3",
        "-100.0",
    ]
    assert [p_value(p) for p in (0.0, 0.00099, 0.001, 0.0496, 1.0)] == [
        "< 0.001",
        "< 0.001",
        "0.001",
        "0.050",
        "1.000",
    ]


def test_terminal_shows_headline_then_table_then_pairs_then_findings() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(terminal_report(sample.comparison(), sample.conclusion()))
    text = console.export_text()
    order = ["Cannot tell grpo and <b> apart", "improvement", "+83.3", "[+47.5, +100.0]", "seed 3: killed",
             "about 7 seeds would be needed", "<b> is the same as grpo"]  # fmt: skip
    assert [text.find(part) >= 0 for part in order] == [True] * len(order)
    assert sorted(order, key=text.find) == order


def test_markdown_has_the_same_tables_and_escapes_text(contents: ReportContents) -> None:
    text = markdown(contents)
    assert "**Cannot tell grpo and &lt;b&gt; apart**" in text
    assert "| grpo | 0.0% | 83.3% | +83.3 | \\[+47.5, +100.0\\] | 3 |" in text
    assert "| grpo - &lt;b&gt; | +50.0 |" in text
    outside = re.sub(r"^(`{3,})\n.*?\n\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"</?(\w+)", outside)) == {"details", "summary"}
    assert "@me" not in outside
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in block.split("\n")}) == 1


def test_markdown_says_if_a_completion_was_not_scored(contents: ReportContents) -> None:
    example = contents.examples[0]
    unscored = {arm: {**each, "correct": None} for arm, each in example.completions.items()}
    changed = replace(contents, examples=(replace(example, completions=unscored),))
    text = markdown(changed)
    assert text.count(", not scored:") == page(changed).count("? not scored") == len(unscored)
    assert not re.search(", (in)?correct:", text)


def test_text_is_literal_in_markdown() -> None:
    assert plain("a|b\n<c> *d* [e](f) `g` @h") == (
        "a\\|b &lt;c&gt; \\*d\\* \\[e\\](f) \\`g\\` @\u200bh"
    )
    assert fenced("x\n```\ny") == "````\nx\n```\ny\n````"
    assert fenced("x") == "```\nx\n```"


def test_json_has_every_section_and_a_schema_version(contents: ReportContents) -> None:
    data = report_data(contents)
    assert data["schema"] == SCHEMA == 4
    assert data["prompts"][1] == {"id": "p/1", "prompt": f"p/1: {sample.EVIL}", "target": "<p/1>"}
    assert [(r["arm"], r["seed"], r["state"]) for r in data["runs"]][-1] == ("<b>", 3, "failed")
    assert data["runs"][0]["evaluations"][2] == {
        "step": 20, "tokens": 20_000, "updates": 80, "seconds": 10.0, "accuracy": 0.75, "correct": "1110",
    }  # fmt: skip
    assert data["conclusion"]["pairs"][0]["p_corrected"] == 0.0842
    assert data["agreement"]["solved_only_by"] == {"grpo": 2, "<b>": 0}
    assert data["curves"][0]["high"] == (0.0, 0.5, 1.0)


def test_every_json_field_is_documented(contents: ReportContents) -> None:
    data = report_data(contents)
    assert documented_fields("| field |") == set(data)
    assert documented_fields("| field of a pair |") == set(data["conclusion"]["pairs"][0])
    evaluation = next(run["evaluations"][0] for run in data["runs"] if run["evaluations"])
    assert documented_fields("| field of an evaluation |") == {*evaluation, "reward"}
    assert documented_fields("| field of an arm |") == set(data["conclusion"]["arms"][0])


def documented_fields(heading: str) -> set[str]:
    """Return the fields in the first column of a table of the page on reports."""
    text = (Path(__file__).parents[3] / "docs/compare-report.md").read_text()
    rows = text.partition(f"\n{heading}")[2].partition("\n\n")[0].split("\n")[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_reports_are_deterministic_and_parse(tmp_path: Path) -> None:
    folder = sample.fill(tmp_path)
    write_reports(folder, sample.comparison())
    first = {
        name: (folder / name).read_bytes() for name in ("report.html", "report.md", "report.json")
    }
    write_reports(folder, sample.comparison())
    assert {name: (folder / name).read_bytes() for name in first} == first
    data = json.loads(first["report.json"])
    pair = data["conclusion"]["pairs"][0]
    assert pair["mean"] == 0.5
    assert pair["differences"] == [0.5, 0.5]
    check_page(first["report.html"].decode())


@pytest.mark.parametrize("runs", [(), sample.comparison().runs[-1:], sample.comparison().runs[:1]])
def test_incomplete_comparison_still_has_a_report(
    runs: tuple[sample.RunResult, ...], tmp_path: Path
) -> None:
    write_reports(tmp_path, sample.comparison(runs=runs, findings=()))
    check_page((tmp_path / "report.html").read_text())
    assert json.loads((tmp_path / "report.json").read_text())["completions"]["seed"] is None


def test_the_metric_is_known_without_a_finished_run(tmp_path: Path) -> None:
    graded = replace(
        sample.point(0, "0000"), rewards={"p/0": {"reward": 0.25}, "p/1": {"reward": -3.0}}
    )
    one = replace(sample.run("grpo", 1, state="unfinished"), points=(replace(graded, by="reward"),))
    contents = report_contents(tmp_path, sample.comparison(runs=(one,)))
    data = report_data(contents)
    assert data["compared_by"] == "reward"
    assert data["runs"][0]["evaluations"][0]["reward"] == pytest.approx((0.25 - 3 * 3) / 4)
    assert '"by": "reward"' in page(contents)


def test_nonfinite_numbers_are_null(tmp_path: Path) -> None:
    write_reports(tmp_path, sample.comparison(environment={"x": math.nan}))
    assert json.loads((tmp_path / "report.json").read_text())["environment"] == {"x": None}


def test_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"report\.html"):
        write_reports(tmp_path / "nowhere", sample.comparison())
