"""`covey algorithms`: the list, one algorithm in full, and the error for an unknown name."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest

from covey.cli.main import run
from covey.config.algorithm_names import ALGORITHM_TITLES
from covey.objective import ALGORITHMS
from covey.objective.build import PIECES, extended
from covey.objective.describe import describe

SHARED = inspect.signature(extended).parameters.keys() - {"objective"}


def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, *words: str
) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(["algorithms", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_every_algorithm_is_listed_whole_at_any_width(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = printed(capsys, monkeypatch, columns)
    first = [line.split()[0] for line in out.splitlines() if line[1:2].strip() and line[0] == " "]
    assert [word for word in first if word in ALGORITHMS] == list(ALGORITHMS)
    assert "…" not in out
    table = out.splitlines()[:-1]  # below it stands a sentence
    assert all(len(line) <= columns for line in table)


def test_names_and_papers_known_without_torch_are_those_of_the_algorithms() -> None:
    assert list(ALGORITHM_TITLES) == list(ALGORITHMS)
    for name, title in ALGORITHM_TITLES.items():
        assert describe(name).title == f"{title}."


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_shown_with_every_option(
    name: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = printed(capsys, monkeypatch, columns, name)
    assert out.startswith(f"{name}  ")
    assert "…" not in out
    own = inspect.signature(ALGORITHMS[name]).parameters.keys()
    options = [word for word in out.split() if word.startswith("objective.")]
    # Its own come first, and none comes twice with another default.
    assert options[: len(own)] == [f"objective.{option}" for option in own]
    assert sorted(options) == sorted(f"objective.{option}" for option in own | SHARED)


def test_one_algorithm_in_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = printed(capsys, monkeypatch, 120, "gspo")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "gspo Group Sequence Policy Optimization, arXiv 2507.18071.",
        "s_i = exp( 1/T_i sum_t (logp - old_logp) )",
        "loss = - 1/N sum_i min(s A, clip(s, 1-clip_low, 1+clip_high) A)",
        "advantage standardized",
        "ratio sequence",
        "surrogate clipped",
        "weights sequence_mean_token_mean",
        "KL off",
        "needs -",
        "objective.eps 1e-6 Added to the standard deviation; when whitening, to the variance.",
        "objective.correction_mean_one false Divide corrections by their mean over the step.",
    ):
        assert line in lines
    assert any(line.startswith("Worth knowing:") and "geometric mean" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("rloo", ["KL 0.05 k1 in reward", "needs reference", "objective.kl_in reward"]),
        ("gtpo", ["KL off", "needs entropy, success"]),
        ("clip_cov", ["needs extra forward"]),
        ("dr_grpo", ["objective.length given"]),
        ("composed", ["objective.ratio token", "objective.weights token_mean"]),
    ],
)
def test_what_it_needs_and_what_must_be_given(
    name: str,
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = printed(capsys, monkeypatch, 120, name)
    found = [" ".join(line.split()) for line in out.splitlines()]
    for line in lines:
        assert [f for f in found if f.startswith(line)] != [], line


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_an_unknown_name_gives_the_nearest(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["algorithms", "gsop", *more]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    message = "config: objective.name = 'gsop' is not a known algorithm; did you mean 'gspo'?"
    assert captured.err == f"covey: {message}\n"


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["algorithms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(ALGORITHMS)
    for row in rows:
        own = list(inspect.signature(ALGORITHMS[row["name"]]).parameters)
        assert [option["name"] for option in row["own"]] == own
        assert all(option["meaning"] and option["default"] for option in row["own"])
        assert row["pieces"].keys() == PIECES.keys()
        assert "arXiv" in row["title"]
    assert run(["algorithms", "gspo", "--json"]) == 0
    (gspo,) = [row for row in rows if row["name"] == "gspo"]
    assert json.loads(capsys.readouterr().out) == gspo
    assert gspo["own"][0]["default"] == "0.0003"
    assert run(["algorithms", "composed", "--json"]) == 0
    composed = {option["name"] for option in json.loads(capsys.readouterr().out)["own"]}
    assert composed >= PIECES.keys() | {"beta", "kl"}
    assert not composed & SHARED
    assert gspo["pieces"] == {
        "advantage": "standardized",
        "ratio": "sequence",
        "surrogate": "clipped",
        "weights": "sequence_mean_token_mean",
    }


OWN = '''
from covey.objective import build


def steady(*, low: float = 0.5, strength: float, other=None):
    """Mine.

        loss = none
    """
    return build("gspo", clip_low=low)
'''


def test_a_function_of_ones_own_is_shown_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_shown.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    out = printed(capsys, monkeypatch, 120, "own_shown:steady", "--trust", "own_shown")
    sys.modules.pop("own_shown")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "own_shown:steady Mine.",
        "loss = none",
        "objective.strength given",
        "ratio sequence",
    ):
        assert line in lines
    assert out.count("objective.kl_in ") == 1
