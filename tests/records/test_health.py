"""Health checks: each finding on a stream that goes wrong, and none on streams that do not."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import run as covey
from covey.config import load_config, to_toml
from covey.config.resolve import resolve
from covey.errors import ConfigError
from covey.records.folder import RunFolder
from covey.records.health import Health, check_names, silence, timeline
from covey.records.health_checks import CHECKS

Row = dict[str, Any]
BEGINS = 31
"""The step at which a stream goes wrong."""
WITHIN = 10
"""Steps after which it must be found."""


def healthy_rows(seed: int = 0, steps: int = 60) -> Iterator[Row]:
    """Yield the steps of a run that learns: a noisy reward that rises, entropy that falls."""
    draw = random.Random(seed)
    for step in range(1, steps + 1):
        done = step / 60
        success = 0.2 + 0.6 * done + draw.gauss(0, 0.03)
        yield {
            "step": step,
            "objective/scores": success + 0.1,
            "objective/verifiable_correct_rate": success,
            "objective/parts/correct": success,
            "objective/parts/format": 0.9 + draw.gauss(0, 0.01),
            "objective/kl": 5 * done + abs(draw.gauss(0, 0.1)),
            "policy/clipfrac_avg": 0.15 + draw.gauss(0, 0.02),
            "val/ratio": 1 + draw.gauss(0, 0.005),
            "policy/entropy_avg": 0.8 * (1 - 0.7 * done) + draw.gauss(0, 0.01),
            "policy/approxkl_avg": 0.01,
            "loss/policy_avg": draw.gauss(0, 0.01),
            "optim/grad_norm": 1 + draw.random(),
            "optim/skipped": 0,
            "rollout/zero_variance_groups": 0.3 + draw.gauss(0, 0.05),
            "val/sequence_lengths": 100 + 40 * done + draw.gauss(0, 5),
            "rollout/stop_rate": 0.98,
            "rollout/repetition": 0.05 + abs(draw.gauss(0, 0.01)),
            "rollout/distinct_answers": 40,
            "rollout/effective_answers": 20 + draw.gauss(0, 2),
            "rollout/effective_targets": 12 + draw.gauss(0, 1),
            "rollout/top_answer_share": 0.15,
            "rollout/best_constant": 0.2,
            "debug/sampler_k3": 1e-6 * (1 + draw.random()),
            "time/total": 4 + draw.random(),
            "time/rollout": 2.0,
            "time/score": 0.1,
            "time/training": 2.0,
        }


Break = Callable[[Row, int], Row]
BREAKS: dict[str, Break] = {
    "nan": lambda row, n: {"loss/policy_avg": None},
    "collapse": lambda row, n: {
        "rollout/top_answer_share": 0.996, "rollout/effective_answers": 1.03,
        "rollout/best_constant": 0.375, "objective/verifiable_correct_rate": 0.375, "rollout/effective_targets": 4,
    },
    "few_answers": lambda row, n: {
        "rollout/effective_answers": 2.6, "rollout/top_answer_share": 0.5,
        "rollout/best_constant": 0.316, "rollout/distinct_answers": 3,
    },
    "kl_high": lambda row, n: {"objective/kl": 10.0 + 3 * n},
    "clip_fraction": lambda row, n: {"policy/clipfrac_avg": 0.6},
    "large_updates": lambda row, n: {"policy/approxkl_avg": 0.3},
    "ratio_drift": lambda row, n: {"val/ratio": 1.05 + 0.02 * n},
    "reward_falls": lambda row, n: {
        name: row[name] * max(0.0, 1 - 0.12 * n)
        for name in ("objective/scores", "objective/verifiable_correct_rate", "objective/parts/correct")
    },
    "entropy_collapse": lambda row, n: {
        "policy/entropy_avg": 0.4 * 0.6**n, "objective/verifiable_correct_rate": 0.4, "objective/scores": 0.5,
        "objective/parts/correct": 0.4,
    },
    "parts_against": lambda row, n: {
        "objective/scores": row["objective/scores"] + 0.1 * n,
        "objective/parts/format": 0.9 + 0.2 * n,
        "objective/parts/correct": max(0.0, row["objective/parts/correct"] - 0.06 * n),
        "objective/verifiable_correct_rate": max(0.0, row["objective/verifiable_correct_rate"] - 0.06 * n),
    },
    "length_explosion": lambda row, n: {
        "val/sequence_lengths": 120 * 1.2**n, "objective/verifiable_correct_rate": 0.5, "objective/scores": 0.6,
    },
    "repetition": lambda row, n: {"rollout/repetition": 0.7},
    "no_signal": lambda row, n: {"rollout/zero_variance_groups": 1.0},
    "reward_flat": lambda row, n: {"objective/scores": 0.1},
    "mismatch": lambda row, n: {"debug/sampler_k3": 0.02},
    "stalled": lambda row, n: {"time/total": 60.0, "time/score": 56.0},
    "learned": lambda row, n: {"rollout/zero_variance_groups": 0.97, "objective/verifiable_correct_rate": 0.98},
}  # fmt: skip
SETTINGS = tomllib.loads(to_toml(resolve(load_config("arithmetic", ["objective.beta=0.01"]))))


def broken_rows(name: str, seed: int = 0) -> list[Row]:
    rows = list(healthy_rows(seed, BEGINS + WITHIN - 1))
    return [
        {**row, **BREAKS[name](row, row["step"] - BEGINS + 1)} if row["step"] >= BEGINS else row
        for row in rows
    ]


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_problem_is_found_within_ten_steps(name: str, seed: int) -> None:
    found = [
        finding for finding in timeline(broken_rows(name, seed), SETTINGS) if name == finding.name
    ]
    finding = found[0]
    assert BEGINS - WITHIN <= finding.since <= BEGINS + WITHIN - 1
    assert finding.problem == (name != "learned")
    assert finding.why == CHECKS[name].why


def test_a_format_that_is_learned_without_correct_answers_is_found() -> None:
    rows = [
        {"step": n, "objective/scores": 0.1 * min(1, n / 10), "objective/verifiable_correct_rate": 0.02,
         "objective/parts/format": min(1.0, n / 10)}
        for n in range(1, 21)
    ]  # fmt: skip
    found = {finding.name: finding for finding in timeline(rows, SETTINGS)}
    assert found["format_only"].since == 10
    assert found["format_only"].what == "objective/parts/format 1, success 2.0%"


def test_completions_cut_off_from_the_start_are_named_before_their_consequences() -> None:
    cut = {
        "rollout/stop_rate": 0.02,
        "objective/scores": 0.0,
        "objective/verifiable_correct_rate": 0.0,
    }
    cut |= {"objective/parts/correct": 0.0, "rollout/repetition": 0.8}
    found = timeline(({**row, **cut} for row in healthy_rows(steps=20)), SETTINGS)
    by_name = {finding.name: finding for finding in found}
    assert set(by_name) == {"cut_off", "repetition", "reward_flat"}
    assert by_name["cut_off"].since == 1
    assert by_name["cut_off"].what == "98% of completions reach the token limit before they end"
    limit = SETTINGS["rollout"]["max_tokens"]
    assert by_name["cut_off"].change == (f"rollout.max_tokens = {2 * limit} (now {limit})",)
    # Both would change the learning rate, one down and one up: the first advice stands.
    rate = SETTINGS["optimizer"]["learning_rate"]
    advised = [line for finding in found for line in finding.change if "learning_rate" in line]
    assert advised == [f"optimizer.learning_rate = {rate / 2:g} (now {rate:g})"]


def test_every_check_is_tested() -> None:
    assert {*BREAKS, "format_only", "cut_off"} == set(CHECKS)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_found_in_a_run_that_learns(seed: int) -> None:
    assert timeline(healthy_rows(seed, steps=60), SETTINGS) == []


def test_a_finding_names_the_line_to_change_with_its_value() -> None:
    (finding,) = timeline(broken_rows("clip_fraction"), SETTINGS)
    rate = SETTINGS["optimizer"]["learning_rate"]
    assert f"optimizer.learning_rate = {rate / 2:g} (now {rate:g})" in finding.change
    assert finding.line().startswith("clip_fraction since step 31: 60% of ratios are clipped; ")


@pytest.mark.parametrize("name", CHECKS)
def test_every_remedy_is_a_line_that_the_configuration_takes(name: str) -> None:
    health = Health(SETTINGS)
    health.history.add({"step": 1})
    finding = health._finding(name, CHECKS[name], "")
    for line in finding.change:
        key, _, value = line.partition(" (now")[0].partition(" = ")
        resolve(load_config("arithmetic", ["objective.beta=0.01", f"{key}={value}"]))
    assert finding.change or finding.also or not finding.problem


def test_a_finding_is_told_once_and_again_after_fifty_steps() -> None:
    health = Health(SETTINGS)
    rows = ({**row, "rollout/repetition": 0.9} for row in healthy_rows(steps=60))
    told = [(row["step"], f.name) for row in rows for f in health.add(row)]
    assert told == [(3, "repetition"), (53, "repetition")]


def test_the_timeline_says_when_a_problem_ended() -> None:
    rows = list(healthy_rows())
    for row in rows[20:30]:
        row["rollout/repetition"] = 0.9
    (finding,) = timeline(rows, SETTINGS)
    assert (finding.name, finding.since, finding.until) == ("repetition", 21, 30)


HACKED = (
    (3.591, 0.289, 28.5, 0.977), (3.320, 0.188, 27.6, 0.992), (3.525, 0.078, 29.3, 0.961), (4.005, 0.078, 33.2, 0.969),
    (4.248, 0.031, 35.7, 0.953), (5.355, 0.016, 40.6, 0.742), (4.973, 0.055, 39.8, 0.844), (5.903, 0.008, 43.6, 0.602),
    (6.002, 0.023, 42.5, 0.508), (6.025, 0.055, 43.5, 0.539), (6.667, 0.023, 45.8, 0.336), (7.161, 0.008, 46.1, 0.234),
    (7.170, 0.023, 45.7, 0.227), (7.745, 0.000, 46.8, 0.086), (8.469, 0.000, 47.4, 0.023), (8.806, 0.000, 47.9, 0.008),
)  # fmt: skip
"""Reward, success, length and stop rate of the embedded model where every digit is rewarded."""


def test_a_reward_that_is_hacked_at_once_is_named_before_its_consequences() -> None:
    names = (
        "objective/scores",
        "objective/verifiable_correct_rate",
        "val/sequence_lengths",
        "rollout/stop_rate",
    )
    rows = [
        {"step": step, **dict(zip(names, values, strict=True))}
        for step, values in enumerate(HACKED, start=1)
    ]
    found = timeline(rows, SETTINGS)
    assert [finding.name for finding in found] == ["parts_against", "length_explosion"]
    assert [finding.until for finding in found] == [None, None]


def test_a_run_without_a_new_step_is_stalled() -> None:
    rows = list(healthy_rows())
    assert silence(rows, 59.0) is None
    finding = silence(rows, 100.0)
    assert finding is not None
    assert finding.what.startswith("no step for 100 s; a step took ")


def test_a_name_that_is_no_check_is_refused() -> None:
    check_names(["nan", "collapse"])
    with pytest.raises(
        ConfigError,
        match=r"train\.stop_on: 'colapse' is not a known health check; did you mean 'collapse'",
    ):
        check_names(["colapse"])


@pytest.mark.parametrize(("name", "code"), [("collapse", 1), ("learned", 0)])
def test_the_command_reports_and_ends_with_a_code(
    name: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder.create(tmp_path / "run", to_toml(load_config("arithmetic")), {})
    for row in broken_rows(name):
        run.log_step(row)
    assert covey(["runs", "check", str(run.path), "--json"]) == code
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["name"], finding["until"]) == (name, None)
    assert covey(["runs", "check", str(run.path)]) == code
    assert f"{name} since step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flat", "success", "found"),
    [([1.0] * 2, 0.0, []), ([1.0] * 3, 0.0, ["no_signal"]), ([1.0] * 6, 0.0, ["no_signal"]),
     ([0.9, *[1.0] * 5], 0.0, []), ([1.0] * 3, 1.0, ["learned"])],
)  # fmt: skip
def test_a_run_that_never_had_a_signal_is_named_after_three_steps(
    flat: list[float], success: float, found: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = RunFolder.create(tmp_path / "run", to_toml(load_config("arithmetic")), {})
    for n, share in enumerate(flat, start=1):
        run.log_step(
            {"step": n, "objective/scores": success, "objective/verifiable_correct_rate": success,
             "rollout/zero_variance_groups": share, "optim/grad_norm": 0.0}
        )  # fmt: skip
    assert [finding.name for finding in timeline(run.steps(), SETTINGS)] == found
    assert covey(["runs", "check", str(run.path)]) == (found == ["no_signal"])
    output = capsys.readouterr().out
    assert ("too early to say" in output) == (len(flat) < 3)
    assert covey(["runs", "check", str(run.path), "--json"]) == (found == ["no_signal"])
    assert json.loads(capsys.readouterr().out)["early"] == (len(flat) < 3)


def test_a_run_without_steps_cannot_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder.create(tmp_path / "run", "", {})
    assert covey(["runs", "check", str(tmp_path / "run")]) == 1
    assert "has no training steps yet" in capsys.readouterr().err
