"""The health checks: how to detect each training problem, and which settings to change.

Each health check is a function that looks for one problem. The function reads the metrics of the
run's first and most recent steps from a `History`. The function returns a description of the
problem, or None if it finds no problem.

A metric outside of the healthy range in the metric registry is a symptom of a problem. Rewards are
noisy even in healthy runs. A change of the reward is a symptom only if the change is large compared
with the noise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import Any

from covey.records.metric_registry import METRICS, is_number

KEPT = 60
"""Number of recent steps whose metrics stay in memory for health checks."""
START = 5
"""Number of steps at the start of a run. The initial value of a metric is its mean over these
steps."""
BLOCK = 5
"""Number of training steps in a block. Health checks compare a metric's means over two blocks of
steps."""
CERTAIN = 3
"""Number of steps after which a run without any training signal is a finding; with fewer steps, it
is too early to say that nothing is wrong."""
REWARD = "objective/scores"
SUCCESS = "objective/verifiable_correct_rate"
NUMBERS = (REWARD, "loss/policy_avg", "optim/grad_norm", "policy/approxkl_avg")


@dataclass(slots=True)
class History:
    """The metrics of the first and the last steps of a run."""

    rows: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT))
    first: dict[str, list[float]] = field(default_factory=dict)
    """Maps each metric to its values in the first steps of the run."""
    most: dict[str, float] = field(default_factory=dict)
    """Maps each metric to its largest absolute value so far."""
    best: float = -math.inf
    """The highest mean reward of a block of steps, not counting the most recent blocks."""
    blocks: deque[float] = field(default_factory=lambda: deque(maxlen=BLOCK))

    def add(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)
        for name, value in row.items():
            if is_number(value):
                start = self.first.setdefault(name, [])
                if len(start) < START:
                    start.append(value)
                self.most[name] = max(abs(value), self.most.get(name, 0.0))
        if rewards := self.last(REWARD, BLOCK):
            if len(self.blocks) == BLOCK:
                self.best = max(self.best, self.blocks[0])
            self.blocks.append(fmean(rewards))

    @property
    def row(self) -> Mapping[str, Any]:
        return self.rows[-1]

    def last(self, name: str, count: int, before: int = 0) -> list[float]:
        """Return the values of a metric in the last `count` steps, not counting the newest `before`
        steps.

        Return [] if the metric is missing in any of the `count` steps.
        """
        stop = len(self.rows) - before
        if stop < count:
            return []
        values = [self.rows[place].get(name) for place in range(stop - count, stop)]
        return [v for v in values if is_number(v)] if all(map(is_number, values)) else []

    def mean(self, name: str, count: int, before: int = 0) -> float:
        values = self.last(name, count, before)
        return fmean(values) if values else math.nan

    def start(self, name: str) -> float:
        """Return the mean of a metric's first values, or NaN if there are too few values."""
        values = self.first.get(name, [])
        return fmean(values) if len(values) == START else math.nan

    def parts(self) -> list[str]:
        """Return the names of the metrics that log the parts of the reward."""
        return [name for name in self.row if name.startswith("objective/parts/")]


def noise(values: Sequence[float]) -> float:
    """Estimate the standard deviation of the noise in a series that may have a trend.

    >>> noise([1.0, 2.0, 3.0, 4.0]), round(noise([0, 1, 0, 1, 0]), 3)
    (0.0, 1.048)
    """
    steps = [b - a for a, b in pairwise(values)]
    middle = median(steps)
    # The median of |a - b| is 0.954 sigma for normal noise.
    return median(abs(step - middle) for step in steps) / 0.954


def high(name: str) -> float:
    _, top = METRICS[name].healthy or (None, None)
    assert top is not None, f"{name} has an upper bound"
    return top


def above_range(name: str, text: str, history: History) -> str | None:
    """Find a metric that was above its healthy range in each of the last 3 steps."""
    values = history.last(name, 3)
    return text.format(values[-1]) if values and min(values) > high(name) else None


def not_finite(history: History) -> str | None:
    """Find NaN values, and optimizer steps that were skipped because of NaN values."""
    row = history.row
    bad = [name for name in NUMBERS if name in row and not is_number(row[name])]
    if bad:
        return f"{' and '.join(bad)} {'is' if len(bad) == 1 else 'are'} not finite"
    skipped = row.get("optim/skipped") or 0
    return (
        f"{skipped} optimizer steps skipped, because gradients were not finite" if skipped else None
    )


def reward_falls(history: History) -> str | None:
    """Find a reward that fell far below its best value."""
    rewards = history.last(REWARD, min(len(history.rows), 20))
    if len(rewards) < 2 * BLOCK or not math.isfinite(history.best):
        return None
    now, best, start = fmean(rewards[-BLOCK:]), history.best, history.start(REWARD)
    limit = max(6 * noise(rewards) * math.sqrt(2 / BLOCK), 0.25 * abs(best - start), 0.05 * best)
    return f"reward {now:.3g}, after {best:.3g} at its best" if best - now > limit > 0 else None


def reward_flat(history: History) -> str | None:
    """Find a reward that does not rise although the task is not learned yet."""
    success = history.mean(SUCCESS, BLOCK)
    short, long = history.last(REWARD, 10), history.last(REWARD, 50)
    if short and success < 0.95 and pstdev(short) <= 1e-3 * max(abs(fmean(short)), 1e-2):
        return f"reward {fmean(short):.3g} in each of 10 steps"
    if not long or not success < 0.9:
        return None
    gain, error = fmean(long[25:]) - fmean(long[:25]), noise(long) * math.sqrt(2 / 25)
    return f"reward gained {gain:+.2g} in 50 steps, within its noise" if gain < error else None


def large_updates(history: History) -> str | None:
    """Find optimizer steps that change the policy too much within one training step."""
    values, limit = history.last("policy/approxkl_avg", 3), high("policy/approxkl_avg")
    if not values or not fmean(values) > limit:
        return None
    return f"KL between the policy before and after a step {fmean(values):.2g} nats per token"


def ratio_drift(history: History) -> str | None:
    """Find a mean probability ratio that stays far from 1 over several steps."""
    values = history.last("val/ratio", 5)
    low, _ = METRICS["val/ratio"].healthy or (None, None)
    assert low is not None, "val/ratio has a lower bound"
    if not values or not (max(values) < low or min(values) > high("val/ratio")):
        return None
    return f"mean ratio {fmean(values):.3g}"


def uniform_groups(history: History, *, learned: bool) -> str | None:
    """Find many groups with equal rewards in the last 10 steps, or only such groups in the run.

    With `learned`, report only runs with a success rate above 90 %. Without `learned`, report only
    runs with a success rate of at most 90 %.
    """
    name = "rollout/zero_variance_groups"
    steps = min(len(history.rows), 10)
    share = history.mean(name, steps)
    # A run that never had a group with different rewards is certain to have learned nothing.
    limit = high(name) if steps == 10 else 1 - 1e-9 if steps >= CERTAIN else 1.0
    if not share > limit or (history.mean(SUCCESS, steps) > 0.9) != learned:
        return None
    return f"over {steps} steps {share:.0%} of groups had equal rewards and no gradient"


def entropy_collapse(history: History) -> str | None:
    """Find an entropy that fell to nearly 0 while the success rate does not rise."""
    name = "policy/entropy_avg"
    now, start = history.mean(name, 3), history.start(name)
    rises = history.mean(SUCCESS, BLOCK) > history.mean(SUCCESS, BLOCK, before=BLOCK) + 0.01
    if rises or history.mean(SUCCESS, BLOCK) > 0.9 or not now < 0.1 * start:
        return None
    return f"entropy {now:.2g} nats, after {start:.2g} at the start"


def cut_off(history: History) -> str | None:
    """Detect that most completions reach the token limit, both in the first and in recent steps."""
    stops = "rollout/stop_rate"
    ended, once = history.mean(stops, BLOCK), history.start(stops)
    if not (ended < 0.2 and once < 0.2 and history.mean(SUCCESS, BLOCK) < 0.5):
        return None
    return f"{1 - ended:.0%} of completions reach the token limit before they end"


def length_explosion(history: History) -> str | None:
    """Detect completions that get much longer or hit the token limit, without more successes."""
    lengths, stops = "val/sequence_lengths", "rollout/stop_rate"
    now, then = history.mean(lengths, 3), history.mean(lengths, 3, before=7)
    better = history.mean(SUCCESS, 3) > history.mean(SUCCESS, 3, before=7) + 0.02
    if now > 1.5 * then and not better:
        return f"{now:.0f} tokens per completion, {then:.0f} seven steps before"
    ended, once = history.mean(stops, 3), history.start(stops)
    if ended < 0.5 < 0.8 < once and not better:
        return f"{1 - ended:.0%} of completions reach the token limit, {1 - once:.0%} at the start"
    return None


def format_only(history: History) -> str | None:
    """Find a policy that learned the format while hardly any completion is correct."""
    for name in (name for name in history.parts() if "format" in name):
        values, success = history.last(name, 10), history.last(SUCCESS, 10)
        top = history.most[name]
        rose = fmean(history.first[name]) < 0.7 * top
        if values and success and min(values) > 0.9 * top and rose and max(success) < 0.1:
            return f"{name} {values[-1]:.2g}, success {success[-1]:.1%}"
    return None


def parts_against(history: History) -> str | None:
    """Detect that the reward, or a part of it, rises while accuracy or another part falls.

    A change counts as a rise if it exceeds 5 standard errors, and as a fall if it exceeds 3
    standard errors. The limit for a fall is lower, because a rise and a fall rarely coincide by
    chance.
    """
    parts = history.parts()
    before = partial(history.mean, count=BLOCK, before=BLOCK)
    for span, old in ((f"in {BLOCK} steps", before), ("since the first steps", history.start)):
        up = {name: _move(history, name, old(name), 5.0) for name in (REWARD, *parts)}
        down = {name: _move(history, name, old(name), 3.0) for name in (SUCCESS, *parts)}
        rises = next((name for name, move in up.items() if move > 0), None)
        falls = next((name for name, move in down.items() if move < 0), None)
        if rises is not None and falls is not None:
            return f"{rises} {up[rises]:+.2g} while {falls} {down[falls]:+.2g} {span}"
    return None


def _move(history: History, name: str, old: float, errors: float) -> float:
    """Return the change of a metric: its mean over the last steps, minus its earlier mean `old`.

    A change of less than `errors` standard errors counts as 0.
    """
    values = history.last(name, 2 * BLOCK)
    if not values:
        return 0.0
    move = fmean(values[BLOCK:]) - old
    longer = history.last(name, min(len(history.rows), 30)) or values
    limit = max(errors * noise(longer) * math.sqrt(2 / BLOCK), 0.15 * history.most[name])
    return move if abs(move) > limit else 0.0


def mismatch(history: History) -> str | None:
    """Find an engine whose log-probs drift away from the trainer's log-probs."""
    name = "debug/sampler_k3"
    values, start = history.last(name, 3), history.start(name)
    if not values or history.row.get("data/replayed_groups"):  # sampled by older weights
        return None
    grew = min(values) > 1e-4 and min(values) > 10 * start
    if min(values) <= high(name) and not grew:
        return None
    return f"KL of engine and trainer {values[-1]:.2g}, at the start {start:.2g}"


def stalled(history: History) -> str | None:
    """Find a step that took at least 30 seconds and at least 5 times as long as usual."""
    times = history.last("time/total", 6)
    if not times or times[-1] < 30 or times[-1] < 5 * median(times[:-1]):
        return None
    names = ("time/rollout", "time/score", "time/training", "time/wait_rollouts")
    parts = {n: history.row[n] - history.mean(n, 5, before=1) for n in names if n in history.row}
    slow = max(parts, key=parts.__getitem__, default="time/total")
    return f"a step of {times[-1]:.0f} s, after {median(times[:-1]):.0f} s; most of it in {slow}"


def collapse(history: History) -> str | None:
    """Find a policy that gives the same final answer to every prompt."""
    name = "rollout/top_answer_share"
    shares, constants = history.last(name, 2), history.last("rollout/best_constant", 2)
    if not shares or not constants or min(shares) <= high(name) or max(constants) > 0.9:
        return None
    accuracy, best = history.mean(SUCCESS, 2), fmean(constants)
    return (
        f"{shares[-1]:.0%} of completions have the same final answer, whatever the prompt; "
        f"accuracy {accuracy:.1%}, and {best:.1%} for the best constant answer"
    )


def few_answers(history: History) -> str | None:
    """Find a policy whose answers are much less varied than the targets of its prompts."""
    # Means over several steps: in a step with few prompts, the number of targets varies a lot.
    answers = history.mean("rollout/effective_answers", BLOCK)
    targets = history.mean("rollout/effective_targets", BLOCK)
    if not (targets >= 3 and answers < 0.5 * targets) or collapse(history) is not None:
        return None
    count = history.row.get("rollout/distinct_answers", 0)
    return (
        f"{count} distinct answers, effectively {answers:.1f}; the targets are effectively "
        f"{targets:.1f}"
    )


Settings = Mapping[str, Any]
"""The configuration of a run as nested dictionaries: each section maps settings to values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A health check."""

    find: Callable[[History], str | None]
    steps: int
    """Number of recent steps whose metrics the check uses; the first of these steps is reported as
    the start of the problem."""
    why: str
    change: tuple[tuple[str, Any], ...]
    """Pairs of a setting and its new value. A factor (`Times`) multiplies the current value of the
    setting."""
    also: str = ""
    """Advice that is not a change of settings, such as to use easier prompts."""
    problem: bool = True
    """True if the check detects a problem; False if it only gives information."""


@dataclass(frozen=True, slots=True)
class Times:
    """A factor by which to multiply a setting."""

    factor: float
    instead_of_zero: float = 0.0
    """The suggested value for a setting that is now 0, because a factor cannot change 0."""


_SLOWER = ("optimizer.learning_rate", Times(0.5))
_MORE_KL = ("objective.beta", Times(2.0, instead_of_zero=0.01))
_WARMER = ("rollout.temperature", Times(1.25))

CHECKS: Mapping[str, Check] = {
    "nan": Check(
        find=not_finite,
        steps=1,
        why="the step is lost, and weights that are not finite never recover",
        change=(_SLOWER, ("model.dtype", "float32")),
    ),
    "cut_off": Check(
        find=cut_off,
        steps=BLOCK,
        why="a completion without its end rarely contains an answer",
        change=(("rollout.max_tokens", Times(2)),),
        also="ask for shorter completions in the prompt",
    ),
    "collapse": Check(
        find=collapse,
        steps=2,
        why="one answer for all prompts is only as accurate as the most frequent target",
        change=(_WARMER, _SLOWER),
        also="balance the targets of the data, so that no constant answer gets much reward",
    ),
    "few_answers": Check(
        find=few_answers,
        steps=5,
        why="the policy may have found a shortcut to the frequent targets",
        change=(_WARMER,),
        also="balance the targets of the data, and read completions that are correct",
    ),
    "kl_high": Check(
        find=partial(above_range, "objective/kl", "KL to the reference {:.3g} nats"),
        steps=3,
        why="a policy this far from its reference may lose other abilities",
        change=(_MORE_KL, _SLOWER),
    ),
    "clip_fraction": Check(
        find=partial(above_range, "policy/clipfrac_avg", "{:.0%} of ratios are clipped"),
        steps=3,
        why="the optimizer steps after the first have hardly any gradient left",
        change=(_SLOWER, ("train.mini_batches", 1), ("train.epochs", 1)),
    ),
    "large_updates": Check(
        find=large_updates,
        steps=3,
        why="a policy that changes this much in a step soon loses its abilities",
        change=(_SLOWER, ("optimizer.warmup_steps", 10)),
    ),
    "ratio_drift": Check(
        find=ratio_drift,
        steps=5,
        why="old and new policy differ so much that the surrogate loss is no longer valid",
        change=(_SLOWER, ("optimizer.warmup_steps", 10)),
    ),
    "reward_falls": Check(
        find=reward_falls,
        steps=BLOCK,
        why="the policy gets worse at what it is rewarded for",
        change=(_SLOWER, _MORE_KL),
        also="resume from an earlier checkpoint",
    ),
    "entropy_collapse": Check(
        find=entropy_collapse,
        steps=3,
        why="completions of a group become equal, and equal completions have no gradient",
        change=(_WARMER, ("objective.clip_high", Times(1.4)), _SLOWER),
    ),
    "parts_against": Check(
        find=parts_against,
        steps=BLOCK,
        why="the policy may have learned to please the reward instead of the task",
        change=(),
        also="read the completions with the highest rewards (samples/), and test the reward "
        "with `covey rewards lab`",
    ),
    "length_explosion": Check(
        find=length_explosion,
        steps=7,
        why="long completions cost time, and truncated completions are scored as failures",
        change=(("length_penalty.name", "soft"), ("filter.mask_truncated", True)),
    ),
    "repetition": Check(
        find=partial(
            above_range, "rollout/repetition", "{:.0%} of 4-grams repeat within their completion"
        ),
        steps=3,
        why="repeated text gets reward without solving the task, or reaches the token limit",
        change=(_SLOWER, _MORE_KL),
    ),
    "no_signal": Check(
        find=partial(uniform_groups, learned=False),
        steps=10,
        why="a group whose rewards are equal has no advantage, and so no gradient",
        change=(("filter.dynamic_sampling", True), _WARMER),
        also="easier prompts if nearly all completions fail, or a reward for partial success",
    ),
    "format_only": Check(
        find=format_only,
        steps=10,
        why="the policy gets the reward for the format, but none for correct answers",
        change=(("rollout.group_size", Times(2)),),
        also="easier prompts, or a smaller weight of the format",
    ),
    "reward_flat": Check(
        find=reward_flat,
        steps=10,
        why="nothing is learned",
        change=(("optimizer.learning_rate", Times(2.0)), ("rollout.group_size", Times(2))),
        also="check the reward with `covey rewards lab`",
    ),
    "mismatch": Check(
        find=mismatch,
        steps=3,
        why="the policy that samples differs from the policy that is trained",
        change=(("objective.correction", "token_truncate"), ("model.dtype", "float32")),
    ),
    "stalled": Check(
        find=stalled,
        steps=1,
        why="the step waited for a worker, an engine or the disk",
        change=(("scoring.timeout", Times(0.5)),),
    ),
    "learned": Check(
        find=partial(uniform_groups, learned=True),
        steps=10,
        why="nearly all completions are correct: stop, or use harder prompts",
        change=(),
        problem=False,
    ),
}
"""Maps the name of each health check to the check. Reports list findings in the order of `CHECKS`,
which puts causes before effects."""
