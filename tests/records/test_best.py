"""The metric that `save.best` names."""

from __future__ import annotations

import pytest

from covey.config import load_config
from covey.errors import ConfigError
from covey.records.metric_registry import METRICS, RENAMED, metric
from covey.training.resolve import resolve


def check(name: str, samples: int = 4) -> None:
    settings = [f"save.best={name}", f"evaluate.samples={samples}"]
    resolve(load_config("arithmetic", settings), imports=False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("val/sequence_lengths", "rollout/lengths"),
        ("val/sequence_lengths_max", "rollout/lengths_max"),
        ("val/ratio_max", "policy/ratio_max"),
        ("val/advantages_mean", "reward/advantages_mean"),
        ("val/zero_variance_groups", "rollout/zero_variance_groups"),
        ("val/learned_groups", "rollout/trained_groups"),
        ("val/rounds", "rollout/rounds"),
        ("val/dropped_stale", "rollout/dropped_stale"),
        ("val/off_policy_dropped", "policy/off_policy_dropped"),
        ("val/correction_ess", "policy/correction_ess"),
        ("val/stop_rate", "rollout/stop_rate"),
        ("val/num_stop_token_ids", "rollout/stop_tokens"),
        ("val/format_scores", "objective/parts/format"),
        ("warmup/solutions", "sft/examples"),
        ("warmup/tokens", "sft/tokens"),
        ("objective/entropy", "policy/entropy_avg"),
    ],
)
def test_an_old_metric_name_is_an_error_that_gives_the_new_name(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=f"save.best: the metric '{old}' was renamed to '{new}'$"):
        check(old)


def test_every_prefix_of_old_names_belongs_to_a_metric() -> None:
    for new in RENAMED.values():
        assert any(name.startswith(new) for name in METRICS)
    assert [name for name in METRICS if name.startswith("val/")] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("time/total", "depends on the machine"),
        ("greeedy", "did you mean 'greedy'"),
        ("objective/succes", "did you mean 'objective/success'"),
        ("pass@8", "evaluations with evaluate.samples = 4; did you mean 'pass@4'"),
        ("val/nothing_like_it", "choose from greedy, mean@4, pass@2, pass@4, reward$"),
    ],
)
def test_an_unknown_metric_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(name)


@pytest.mark.parametrize(
    "name", ["greedy", "reward", "mean@4", "pass@2", "objective/success", "objective/parts/form"]
)
def test_metrics_of_steps_and_of_evaluations_are_accepted(name: str) -> None:
    check(name)
    assert (metric(name) is None) == (name in ("greedy", "reward", "mean@4", "pass@2"))
