from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.errors import ConfigError
from covey.rewards.length import LENGTH_PENALTIES, GroupRelative, NoPenalty, Soft, Unfinished
from covey.types import Rollout


def answers(*answers: tuple[int, bool | None]) -> list[Rollout]:
    return [
        Rollout.single_turn(
            prompt_id="p", sample=n, prompt_tokens=(7,), tokens=(9,) * tokens,
            trained=(True,) * tokens, sampler_logp=(-0.5,) * tokens, text="", finish="stop",
            policy_version=0, reward=None if right is None else float(right), success=right,
        )
        for n, (tokens, right) in enumerate(answers)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (1, 0.0),
        (11, 0.0),
        (12, 0.0),
        (13, -0.125),
        (16, -0.5),
        (19, -0.875),
        (20, -1.0),
        (30, -1.0),
    ],
)
def test_soft_punishment_by_length(length: int, penalty: float) -> None:
    assert Soft(limit=20, cache=8)(answers((length, True))) == [pytest.approx(penalty)]


@given(st.integers(2, 200), st.data())
def test_soft_punishment_is_continuous_and_ends_at_minus_one(
    limit: int, data: st.DataObject
) -> None:
    cache = data.draw(st.integers(1, limit))
    soft = Soft(limit=limit, cache=cache)
    assert soft.of(limit - cache) == 0.0
    assert soft.of(limit) == soft.of(limit + 1) == -1.0
    steps = [soft.of(n) - soft.of(n + 1) for n in range(limit + 3)]
    assert all(-1e-12 <= step <= 1 / cache + 1e-12 for step in steps)


@pytest.mark.parametrize(
    ("group", "penalties"),
    [
        # easy: three of four correct; L = max(15, 13.3) of the correct ones, which are penalised
        ([(10, True), (10, True), (20, True), (90, False)], [0.0, 0.0, -0.5 / 3, 0.0]),
        # hard: one of four correct: no penalty
        ([(10, True), (99, False), (99, False), (99, False)], [0.0] * 4),
        # between, more correct: L of all = max(25, 20), and the correct ones are penalised
        ([(10, True), (40, True), (40, False), (10, True), (10, False)],
         [0.0, -0.5 * 15 / 25, 0.0, 0.0, 0.0]),
        # between, as many wrong: the wrong ones are penalised
        ([(10, True), (40, True), (40, False), (10, False)], [0.0, 0.0, -0.5 * 15 / 25, 0.0]),
        # twice as long or more: the full penalty
        ([(10, True)] * 9 + [(100, True)], [0.0] * 9 + [-0.5 * 45 / 55]),
        # none correct, and unscored rollouts
        ([(10, False), (30, False)], [0.0, 0.0]),
        ([(10, True), (30, True), (99, None)], [0.0, -0.25, 0.0]),
    ],
)  # fmt: skip
def test_group_relative_punishment(group: list, penalties: list[float]) -> None:
    assert GroupRelative()(answers(*group)) == pytest.approx(penalties)


@pytest.mark.parametrize(("easy", "many"), [(0.8, 5), (0.9, 10)])
def test_a_share_of_exactly_one_less_easy_is_hard(easy: float, many: int) -> None:
    # (1 - 0.8) * 5 is a little less than 1.
    group = [(10, True), *((10 * n, False) for n in range(1, many))]
    assert GroupRelative(easy=easy)(answers(*group)) == [0.0] * many


def test_no_punishment_is_none() -> None:
    assert NoPenalty()(answers((5, True), (6, None))) == [0.0, 0.0]
    assert list(LENGTH_PENALTIES) == ["none", "soft", "group_relative", "unfinished"]


@pytest.mark.parametrize("options", [{"limit": 5, "cache": 6}, {"limit": 5, "cache": 0}])
def test_a_cache_that_does_not_fit_is_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match="cache"):
        Soft(**options)


@pytest.mark.parametrize("options", [{"easy": 0.4}, {"easy": 1.1}, {"size": -0.1}])
def test_shares_outside_their_range_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match=r"between 0\.5 and 1"):
        GroupRelative(**options)


@pytest.mark.parametrize(
    ("at_most", "penalties"),
    [(0.0, [0.0, -1.0, 0.0, 0.0]), (-0.5, [0.0, -1.5, -0.5, 0.0]), (0.25, [0.0, -0.75, 0.0, 0.0])],
)
def test_truncated_completions_get_at_most_the_given_reward(
    at_most: float, penalties: list[float]
) -> None:
    ended, right, wrong, unscored = answers((3, True), (9, True), (9, False), (9, None))
    cut_off = [replace(r, finish="length") for r in (right, wrong, unscored)]
    assert Unfinished(at_most=at_most)([ended, *cut_off]) == penalties
