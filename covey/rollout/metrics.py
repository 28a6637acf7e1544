"""Metrics of a step's rollouts, of dropped groups, and of generation that overlaps training."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from covey.objective.advantage import zero_variance
from covey.rollout.collect import Collected, StepRollouts
from covey.types import TRUNCATED, Group, Rollout

if TYPE_CHECKING:
    from covey.config.schema import Overlap

MOST_READ = 128
"""Maximum number of completions in which final answers and repetitions are counted."""
GRAM = 4
"""Length of the token n-grams whose repetitions are counted."""


def rollout_metrics(collected: Collected, stop_ids: Sequence[int] = ()) -> dict[str, float]:
    """Return the metrics of all rollouts of a step, including rollouts that are not trained on."""
    rollouts = collected.rollouts
    scored = [r for r in rollouts if r.reward is not None]
    rewards = np.array([r.reward for r in scored], dtype=float)
    metrics = {
        "objective/scores": float(rewards.mean()),
        "objective/reward_std": float(rewards.std()),
        "objective/group_std": _mean([_deviation(group) for group in collected.groups]),
        "objective/verifiable_correct_rate": _mean([float(bool(r.success)) for r in scored]),
        "objective/unscored": len(rollouts) - len(scored),
        **_signal_metrics(collected.groups),
        "rollout/stop_rate": _mean([float(r.finish not in TRUNCATED) for r in rollouts]),
    }
    for name in sorted({name for r in scored for name in r.parts}):
        metrics[f"objective/parts/{name}"] = _mean(
            [r.parts[name] for r in scored if name in r.parts]
        )
    stops = [sum(r.tokens.count(stop) for stop in stop_ids) for r in rollouts]
    return {
        **metrics,
        **_length_metrics(rollouts),
        **_episode_metrics(rollouts),
        "val/stop_token_rate": _mean([float(count > 0) for count in stops]),
        "val/num_stop_token_ids": sum(stops),
        **answer_metrics(collected.groups),
    }


def repetition(rows: Sequence[Sequence[int]]) -> float:
    """Return the fraction of token 4-grams that occurred earlier in the same completion.

    >>> repetition([[1, 2, 1, 2, 1, 2]])  # of three, 1212 comes twice
    0.3333333333333333
    """
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    tokens = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=lengths.sum())
    row = np.repeat(np.arange(len(rows)), lengths)
    # Pairs of tokens are numbered, then pairs of these numbers: equal numbers are equal 4-grams.
    for distance in (1, 2):
        tokens = np.unique(tokens[:-distance] << 32 | tokens[distance:], return_inverse=True)[1]
    within = row[GRAM - 1 :] == row[: len(tokens)]
    grams = np.unique(row[: len(tokens)][within] << 32 | tokens[within])
    return float((within.sum() - len(grams)) / max(1, within.sum()))


def selection_metrics(rollouts: StepRollouts) -> dict[str, float]:
    """Return the number of dropped groups by reason, and the number of sampling rounds."""
    selected = rollouts.selected
    return {
        "rollout/dropped_unscored": selected.unscored,
        "rollout/dropped_stale": selected.stale,
        "rollout/dropped_uniform": selected.uniform,
        "rollout/dropped_surplus": selected.surplus,
        "rollout/trained_groups": len(selected.groups),
        "rollout/rounds": rollouts.rounds,
    }


def overlap_metrics(
    rollouts: StepRollouts, overlap: Overlap, waited: float, version: int
) -> dict[str, float]:
    """Return a step's staleness and waiting times; `version` is the policy's version.

    `waited` is the number of seconds that training waited for the rollouts.
    """
    if not overlap.staleness:
        return {}
    spans = [
        span for rollout in rollouts.collected.rollouts for s in rollout.segments
        for span in s.versions
    ]  # fmt: skip
    sizes, versions = [span.stop - span.start for span in spans], [span.version for span in spans]
    mean = sum(s * v for s, v in zip(sizes, versions, strict=True)) / max(1, sum(sizes))
    metrics = {
        "overlap/staleness": version - mean,
        "overlap/staleness_max": version - min(versions),
        "overlap/version_min": min(versions),
        "overlap/version_max": max(versions),
    }
    if overlap.mode == "copy":
        metrics["time/wait_rollouts"] = waited
        metrics["time/wait_training"] = rollouts.engine_waited
    return metrics


def _length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [r.sampled for r in rollouts]
    metrics = {
        "val/sequence_lengths": _mean(lengths),
        "val/sequence_lengths_min": min(lengths),
        "val/sequence_lengths_max": max(lengths),
    }
    for name, success in (("solved", True), ("unsolved", False)):
        some = [r.sampled for r in rollouts if r.success is success]
        if some:
            metrics[f"val/sequence_lengths_{name}"] = _mean(some)
    return metrics


def _episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return metrics of turns and tool calls; the result is empty without an environment."""
    episodes = [r.episode for r in rollouts if r.episode is not None]
    if not episodes:
        return {}
    calls = [call for episode in episodes for call in episode.tool_calls]
    limits = {"turn_limit", "tool_limit", *TRUNCATED}
    return {
        "rollout/turns": _mean([len(episode.turn_rewards) for episode in episodes]),
        "rollout/tool_calls": len(calls) / len(episodes),
        "rollout/unreadable_calls": sum("error" in call for call in calls),
        "rollout/segments": _mean([len(r.segments) for r in rollouts]),
        "rollout/limit_rate": _mean([float(e.finish in limits) for e in episodes]),
        "rollout/environment_errors": sum(e.finish == "error" for e in episodes),
    }


def _deviation(group: Group) -> float:
    rewards = [r.reward for r in group.rollouts if r.reward is not None]
    return float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0


def _signal_metrics(groups: Sequence[Group]) -> dict[str, float]:
    rows = [(n, math.nan if r.reward is None else r.reward) for n, g in enumerate(groups)
            for r in g.rollouts]  # fmt: skip
    index, rewards = zip(*rows, strict=True)
    group = torch.tensor(index)
    flat = zero_variance(torch.tensor(rewards, dtype=torch.float64), group)
    return {
        "rollout/zero_variance_groups": len(set(group[flat].tolist())) / len(groups),
        "other/real_batch_size_ratio": 1 - float(flat.double().mean()),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# Statistics of final answers, which reveal a policy that ignores the prompt.
#
# The reward also rises if a policy learns to answer every prompt with the most frequent target, so
# only the variety of the answers shows whether it learns the task or ignores the prompt.

LONGEST_TARGET = 64
"""Maximum target length, in characters, for which statistics of targets are computed."""
TAIL = 400
"""Number of characters at the end of a completion in which `final_answer` searches."""

_MARKED = re.compile(r"<answer>(.*?)(?:</answer>|\Z)|\\boxed\{([^{}]*)\}|#### *([^\n]*)", re.DOTALL)
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")


def answer_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return metrics of how varied the answers are, and the accuracy of the best constant
    answer."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    some = rollouts[:: math.ceil(len(rollouts) / MOST_READ)]
    answers = [final_answer(rollout.text) for rollout in some]
    targets = [group.prompt.target for group in groups]
    effective, top_share = variety(answers)
    metrics = {
        "rollout/repetition": repetition([rollout.tokens for rollout in some]),
        "rollout/distinct_answers": len(set(answers)),
        "rollout/effective_answers": effective,
        "rollout/top_answer_share": top_share,
    }
    if all(target.strip() and len(target) <= LONGEST_TARGET for target in targets):
        effective, top_share = variety([target.strip() for target in targets])
        metrics["rollout/effective_targets"] = effective
        metrics["rollout/best_constant"] = top_share
    return metrics


def variety(answers: Sequence[str]) -> tuple[float, float]:
    """Return the effective number of different answers, and the share of the most frequent answer.

    The effective number is `exp(H)`, where H is the entropy of the answers' frequencies.
    """
    counts = Counter(answers)
    shares = [count / len(answers) for count in counts.values()]
    effective = math.exp(-math.fsum(share * math.log(share) for share in shares))
    return effective, max(counts.values()) / len(answers)


def final_answer(text: str) -> str:
    r"""Return the final answer of a completion, for statistics of answers and not for rewards.

    The final answer is the last text in `<answer>`, in `\boxed{}` or after `####`. In a completion
    without `<answer>`, `\boxed{}` and `####`, the final answer is the last number. If a completion
    contains neither an answer marker nor a number, its final answer is its last line.

    >>> final_answer("7 or <answer> 8 </answer>"), final_answer("It is 1,008."), final_answer("No.")
    ('8', '1008', 'no.')
    """
    tail = text[-TAIL:]
    marked = list(_MARKED.finditer(tail))
    if marked:
        answer = next((group for group in marked[-1].groups() if group is not None), "")
    else:
        numbers = _NUMBER.findall(tail)
        answer = numbers[-1].replace(",", "") if numbers else tail.rstrip().rpartition("\n")[2]
    return " ".join(answer.lower().split())
