"""The metric that `save.best` names."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.cli.main import run as covey
from covey.config import load_config
from covey.config.resolve import resolve
from covey.errors import ConfigError
from covey.records.folder import RunFolder
from covey.records.metric_registry import metric
from covey.records.watch import best_step, metric_of


def check(name: str, samples: int = 4) -> None:
    settings = [f"save.best={name}", f"evaluate.samples={samples}"]
    resolve(load_config("arithmetic", settings), imports=False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rollout/lengths", "val/sequence_lengths"),
        ("rollout/stop_tokens", "val/num_stop_token_ids"),
        ("val/format_scores", "objective/parts/format"),
        ("objective/entropy", "policy/entropy_avg"),
    ],
)
def test_an_old_metric_name_is_an_error_that_gives_the_new_name(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=f"save.best: the metric '{old}' was renamed to '{new}'$"):
        check(old)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("time/total", "depends on the machine"),
        ("greeedy", "did you mean 'greedy'"),
        ("objective/reward_st", "did you mean 'objective/reward_std'"),
        ("pass@8", "evaluations with evaluate.samples = 4; did you mean 'pass@4'"),
        ("qqqq/zzzz_xx", "choose from greedy, mean@4, pass@2, pass@4, reward$"),
    ],
)
def test_an_unknown_metric_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(name)


@pytest.mark.parametrize(
    "name",
    [
        "greedy",
        "reward",
        "mean@4",
        "pass@2",
        "objective/verifiable_correct_rate",
        "objective/parts/form",
    ],
)
def test_metrics_of_steps_and_of_evaluations_are_accepted(name: str) -> None:
    check(name)
    assert (metric(name) is None) == (name in ("greedy", "reward", "mean@4", "pass@2"))


@pytest.mark.parametrize(
    ("shown", "meant"),
    [
        ("correct", "parts/correct"),
        ("greedy: correct", "parts/correct"),
        ("parts/correct", "parts/correct"),
        ("evaluation/parts/correct", "parts/correct"),
        ("greedy: reward", "reward"),
        ("evaluation/greedy", "greedy"),
        ("evaluation/pass@2", "pass@2"),
        ("mean_tokens", "mean_tokens"),
        ("objective/scores", "objective/scores"),
    ],
)
def test_a_metric_may_be_named_as_tables_and_trackers_show_it(shown: str, meant: str) -> None:
    check(shown)
    assert metric_of(shown) == meant


def test_the_best_step_is_that_of_the_named_part(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", '[save]\nbest = "greedy: format"\n', {})
    estimate = {"value": 0.5, "low": 0.0, "high": 1.0}
    for step, value in ((1, 0.2), (2, 0.9), (3, 0.4)):
        part = {**estimate, "value": value}
        run.log_evaluation(
            {"step": step, "prompts": 4, "greedy": estimate, "parts/format": part, "parts": {}}
        )
        (run.path / f"checkpoints/{step:06d}").mkdir()
    assert best_step(run) == 2


def test_a_part_that_no_evaluation_has_ends_the_run_at_the_first_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "save.best=corect", "--set", "train.steps=1", "--set", "evaluate.prompts=4"]
    assert covey(["train", "--run", str(tmp_path / "run"), *words]) == 2
    error = capsys.readouterr().err
    assert "save.best" in error
    assert "parts/correct" in error
    assert RunFolder(tmp_path / "run").steps() == []
