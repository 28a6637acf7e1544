"""False positives, power and coverage of the statistics of comparisons and evaluations.

    python benchmarks/comparison_statistics.py

Everything is simulated, so that the truth is known. Two arms whose mean accuracies over all seeds
are equal are compared with 3, 5, 8 and 12 seeds, for many shapes of the distribution over seeds: a
decision for one arm is a false positive. The intervals of evaluations are computed for prompts of
many difficulties, also near an accuracy of 0 and 1, and for rewards; they should contain the truth.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from described import described
from numpy.typing import NDArray

from covey.evaluation.intervals import mean_over_prompts, pass_at_k
from covey.lab.compare.statistics import (
    LEVEL,
    detectable,
    least_difference,
    power,
    seed_bounds,
    seed_test,
    student_test,
)

Array = NDArray[np.float64]
RESULT = Path(__file__).parent / "results" / "statistics.json"
SEEDS = (3, 5, 8, 12)
PROMPTS = 1000
Draw = Callable[[np.random.Generator, tuple[int, int]], tuple[Array, Array]]
"""Draws the true accuracies of two arms, [repetitions, seeds]. Their expectations are equal."""


def steady(value: float, shape: tuple[int, int]) -> Array:
    return np.full(shape, value)


def either(chance: float, one: float, other: float) -> Callable[..., Array]:
    """A run ends at `one` with a probability of `chance`, and at `other` otherwise."""
    return lambda rng, shape: np.where(rng.random(shape) < chance, one, other)


def _both(draw: Callable[..., Array]) -> Draw:
    return lambda rng, shape: (draw(rng, shape), draw(rng, shape))


def _against(value: float, draw: Callable[..., Array]) -> Draw:
    return lambda rng, shape: (draw(rng, shape), steady(value, shape))


def _skewed(sign: float, scale: float) -> Callable[..., Array]:
    mean = math.exp(0.5)
    return lambda rng, shape: 0.5 + sign * scale * (rng.lognormal(size=shape) - mean)


SHAPES: dict[str, Draw] = {
    "normal, deviation 2 points": _both(lambda rng, shape: rng.normal(0.5, 0.02, shape)),
    "normal, deviation 7 points": _both(lambda rng, shape: rng.normal(0.5, 0.07, shape)),
    "normal, deviation 15 points": _both(lambda rng, shape: rng.normal(0.5, 0.15, shape)),
    "bimodal, 40 or 60 points": _both(either(0.5, 0.6, 0.4)),
    "bimodal, 10 or 90 points": _both(either(0.5, 0.9, 0.1)),
    "t with 3 degrees of freedom": _both(lambda rng, shape: 0.5 + 0.05 * rng.standard_t(3, shape)),
    "lognormal": _both(_skewed(1.0, 0.05)),
    "one arm skewed to the right": _against(0.5, _skewed(1.0, 0.04)),
    "one arm skewed to the left": _against(0.5, _skewed(-1.0, 0.04)),
    "both collapse in one of six seeds": _both(either(1 / 6, 0.0, 0.6)),
    "one arm collapses in one of six seeds, from 30": _against(0.25, either(1 / 6, 0.0, 0.3)),
    "one arm collapses in one of six seeds, from 60": _against(0.5, either(1 / 6, 0.0, 0.6)),
    "one arm collapses in one of six seeds, from 96": _against(0.8, either(1 / 6, 0.0, 0.96)),
    "one arm collapses in one of ten seeds, from 60": _against(0.54, either(0.1, 0.0, 0.6)),
    "one arm collapses in one of three seeds, from 60": _against(0.4, either(1 / 3, 0.0, 0.6)),
    "one arm takes off in one of six seeds, from 0 to 60": _against(0.1, either(1 / 6, 0.6, 0.0)),
    "one arm takes off in one of three seeds, to 90": _against(0.3, either(1 / 3, 0.9, 0.0)),
    "10 points more or less by coin flip, at 50": _against(0.5, either(0.5, 0.6, 0.4)),
    "10 points more or less by coin flip, at 20": _against(0.2, either(0.5, 0.3, 0.1)),
}


def accuracies(rng: np.random.Generator, truth: Array) -> Array:
    """Measure true accuracies on PROMPTS prompts."""
    return rng.binomial(PROMPTS, np.clip(truth, 0.0, 1.0)) / PROMPTS


def false_positives(repetitions: int) -> Iterator[dict[str, Any]]:
    """Yield how often equal means are called different: by the decision, and by Student's t."""
    for number, (name, draw) in enumerate(SHAPES.items()):
        for seeds in SEEDS:
            rng = np.random.default_rng((number, seeds))
            a, b = (accuracies(rng, truth) for truth in draw(rng, (repetitions, seeds)))
            yield {
                "shape": name,
                "seeds": seeds,
                "false_positives": float((seed_test(a, b, PROMPTS) < LEVEL).mean()),
                "student": float((student_test(a - b, PROMPTS) < LEVEL).mean()),
            }


def several_pairs(repetitions: int) -> Iterator[dict[str, Any]]:
    """Yield how often any displayed interval excludes 0 although all arms are equal."""
    # Differences as large as these are what such seeds can decide.
    draw = either(0.5, 0.95, 0.05)
    for arms in (2, 3, 4, 6):
        for seeds in SEEDS:
            rng = np.random.default_rng((arms, seeds))
            values = accuracies(rng, draw(rng, (arms, repetitions, seeds)))
            pairs = [(i, j) for i in range(arms) for j in range(i)]
            level = LEVEL / len(pairs)
            excluded, decided = np.zeros((2, repetitions), dtype=bool)
            for i, j in pairs:
                low, high = seed_bounds(values[i], values[j], PROMPTS, level=level)
                excluded |= (low > 0) | (high < 0)
                decided |= seed_test(values[i], values[j], PROMPTS) < level
            yield {
                "arms": arms,
                "seeds": seeds,
                "any_interval_excludes_0": float(excluded.mean()),
                "any_decision": float(decided.mean()),
                "disagreements": int((excluded != decided).sum()),
            }


def powers(repetitions: int) -> Iterator[dict[str, Any]]:
    """Yield how often true differences are found, and how often an interval contains them."""
    for base, deviation in ((0.1, 0.02), (0.1, 0.07), (0.3, 0.02), (0.3, 0.07), (0.3, 0.15)):
        for difference in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
            for seeds in (*SEEDS, 20):
                rng = np.random.default_rng(seeds)
                truth = rng.normal(base, deviation, (2, repetitions, seeds))
                truth[0] += difference
                truth = np.clip(truth, 0.0, 1.0)
                true = float((truth[0] - truth[1]).mean())
                a, b = accuracies(rng, truth)
                low, high = seed_bounds(a, b, PROMPTS)
                yield {
                    "accuracy": base,
                    "deviation": deviation,
                    "difference": difference,
                    "seeds": seeds,
                    "power": float((low > 0).mean()),
                    "student": float((student_test(a - b, PROMPTS) < LEVEL).mean()),
                    "coverage": float(((low <= true) & (true <= high)).mean()),
                }


def stated_power(repetitions: int) -> Iterator[dict[str, Any]]:
    """Yield how often the true power at the difference that a report states is at least 80 %."""
    for deviation in (0.02, 0.07, 0.15):
        for seeds in SEEDS:
            rng = np.random.default_rng(seeds)
            truth = rng.normal(0.5, deviation, (2, repetitions, seeds))
            a, b = accuracies(rng, truth)
            spread = float((a - b).std())
            stated = [detectable(x, y, PROMPTS) for x, y in zip(a, b, strict=True)]
            found = [
                power(x / spread, seeds, least=least_difference(0.5, seeds) / spread)
                for x in stated
            ]
            yield {
                "deviation": deviation,
                "seeds": seeds,
                "stated_points_median": 100 * float(np.median(stated)),
                "mean_power": float(np.mean(found)),
                "at_least_80": float((np.array(found) >= 0.8).mean()),
            }


# Intervals of evaluations.

DIFFICULTIES = {
    "very hard": (0.05, 2.0),
    "hard": (0.3, 3.0),
    "mixed": (0.7, 0.7),
    "middle": (2.0, 2.0),
    "easy": (3.0, 0.2),
}
SAMPLES = 8


PENALTY = "penalty of -1 in 3 %"


def _graded(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    return np.where(rng.random(shape) < 0.03, rng.choice([0.3, 0.6, 1.0], shape), 0.0)


REWARDS: dict[str, tuple[float, Callable[[np.random.Generator, tuple[int, int]], Array]]] = {
    # Their bounds are not passed, but for the penalty, which few prompts would not show.
    "binary reward, 2 %": (0.02, lambda rng, shape: (rng.random(shape) < 0.02).astype(float)),
    "binary reward, 50 %": (0.5, lambda rng, shape: (rng.random(shape) < 0.5).astype(float)),
    "binary reward, 99 %": (0.99, lambda rng, shape: (rng.random(shape) < 0.99).astype(float)),
    "graded reward, above 0 in 3 %": (0.03 * 1.9 / 3, _graded),
    PENALTY: (-0.03, lambda rng, shape: -(rng.random(shape) < 0.03).astype(float)),
    "lognormal reward": (math.exp(0.5), lambda rng, shape: rng.lognormal(size=shape)),
}


def coverages(repetitions: int, sizes: tuple[int, ...] = (16, 64, 256)) -> Iterator[dict[str, Any]]:
    """Yield how often the interval of an evaluation contains the truth."""
    for prompts in sizes:
        for name, (alpha, beta) in DIFFICULTIES.items():
            rng = np.random.default_rng(prompts)
            shares = rng.beta(alpha, beta, (repetitions, prompts))
            correct = rng.binomial(SAMPLES, shares)
            everyone = rng.beta(alpha, beta, 2_000_000)
            for metric in ("greedy", f"mean@{SAMPLES}", "pass@2", "pass@4", f"pass@{SAMPLES}"):
                k = int(metric.partition("@")[2] or 1)
                if metric == "greedy":
                    values = rng.binomial(1, shares).astype(float)
                elif metric.startswith("mean"):
                    values = correct / SAMPLES
                else:
                    table = np.array([pass_at_k(SAMPLES, c, k) for c in range(SAMPLES + 1)])
                    values = table[correct]
                one = metric == "greedy" or metric.startswith("mean")
                truth = alpha / (alpha + beta) if one else float((1 - (1 - everyone) ** k).mean())
                yield _coverage(f"{metric}, {name}", values, truth, (0.0, 1.0))
        for name, (truth, draw) in REWARDS.items():
            rng = np.random.default_rng(prompts)
            bounds = (-1.0, 1.0) if name == PENALTY else None
            yield _coverage(name, draw(rng, (repetitions, prompts)), truth, bounds)


def _coverage(
    name: str, values: Array, truth: float, bounds: tuple[float, float] | None
) -> dict[str, Any]:
    found = [mean_over_prompts(row.tolist(), bounds=bounds) for row in values]
    return {
        "metric": name,
        "prompts": values.shape[1],
        "truth": truth,
        "coverage": float(np.mean([each.low <= truth <= each.high for each in found])),
        "width": float(np.mean([each.high - each.low for each in found])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=20_000)
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    report = {
        "level": LEVEL,
        "repetitions": arguments.repetitions,
        "evaluations": arguments.evaluations,
        "false_positives": list(false_positives(arguments.repetitions)),
        "several_pairs": list(several_pairs(arguments.repetitions)),
        "power": list(powers(arguments.repetitions // 4)),
        "stated_power": list(stated_power(arguments.evaluations)),
        "coverage": list(coverages(arguments.evaluations)),
        "environment": described(0, "cpu", 1),
    }
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    false = max(row["false_positives"] for row in report["false_positives"])
    least = min(row["coverage"] for row in report["coverage"])
    print(f"largest rate of false positives {false:.1%}, smallest coverage {least:.1%}")


if __name__ == "__main__":
    main()
