"""Scored completions per second, and whether scoring delays sampling.

    python benchmarks/rewards.py [--out benchmarks/results/rewards.json]

Numbers and formulas pass through the scoring processes as in a run, programs also through the
sandbox. Every completion is new, so no score comes from a cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from described import described

from covey.config import load_config
from covey.config.resolve import resolve
from covey.rewards import Reward, Score
from covey.rewards.code import CodeTests
from covey.rewards.math_answer import MathAnswer
from covey.rollout.collect import Collector
from covey.rollout.episode import encode_prompts
from covey.run import Run
from covey.scoring import InlineScorer, Job, Pool
from covey.tasks.code import Code
from covey.types import Prompt


def prompt(number: int, target: str) -> Prompt:
    messages = ({"role": "user", "content": "?"},)
    return Prompt(id=f"p/{number}", task="t", messages=messages, target=target)


def numbers(count: int) -> list[Job]:
    texts = [
        "<think>I work it out.</think><answer>{}</answer>",
        "So the total is \\boxed{{{}}}.",
        "That makes\n#### {}",
        "The answer is {}.",
    ]
    return [
        Job(prompt=prompt(n, str(n)), texts=(texts[n % 4].format(n + n % 3 // 2),), progress=1.0)
        for n in range(count)
    ]


def formulas(count: int) -> list[Job]:
    """Return correct and wrong formulas as in textbooks, every pair new."""
    jobs = []
    for n in range(2, count + 2):
        target, given = [
            (f"\\frac{{{n}}}{{{n + 7}}}\\sqrt{{2}}", f"\\frac{{{n}\\sqrt{{2}}}}{{{n + 7}}}"),
            (f"x^2 + {n}x", f"x(x+{n})"),
            (f"({n}, {n + 1})", f"({n}, {n + 2})"),
            (f"\\frac{{\\pi}}{{{n}}}", f"\\frac{{2\\pi}}{{{2 * n}}}"),
        ][n % 4]
        jobs.append(Job(prompt=prompt(n, target), texts=(f"\\boxed{{{given}}}",), progress=1.0))
    return jobs


def equations(count: int) -> list[Job]:
    """Return equations and sets, eight different completions per prompt, as in a group."""
    jobs = []
    for n in range(2, count // 8 + 2):
        target = [f"y = {n}x + 1", f"\\{{{n}, {n + 5}\\}}", f"{n}x + 3y = 7"][n % 3]
        for k in range(8):
            given = [
                f"y = 1 + {n + k % 2}x + {k} - {k}",
                f"\\{{{n + 5 + k % 2}, {n} + {k} - {k}\\}}",
                f"{2 * n}x + 6y = 14 + {k % 2} + {k} - {k}",
            ][n % 3]
            jobs.append(Job(prompt=prompt(n, target), texts=(f"\\boxed{{{given}}}",), progress=1.0))
    return jobs


def intervals(count: int) -> list[Job]:
    """Return inequalities, which need math-verify: substituting values does not decide them."""
    return [
        Job(
            prompt=prompt(n, f"x > {n}"),
            texts=(f"\\boxed{{({n + n % 2}, \\infty)}}",),
            progress=1.0,
        )
        for n in range(2, count + 2)
    ]


def programs(count: int) -> list[Job]:
    task = Code()
    prompts = [*task.train(), *task.held_out()]
    numbered = [(n, prompts[n % len(prompts)]) for n in range(count)]
    # Prompts repeat; the comment makes every completion new.
    return [
        Job(prompt=p, texts=(f"{p.info['solution']}\n# {n}\n",), progress=1.0) for n, p in numbered
    ]


def rate(
    reward: Reward, make: Callable[[int], Sequence[Job]], count: int, workers: int
) -> dict[str, float]:
    """Time the scoring of `count` completions, after a warm-up of every process."""
    warm = 8 * workers  # prompts have up to eight completions
    jobs = make(count + warm)
    first, jobs = jobs[:warm], jobs[warm:]  # repeated completions would come from the cache
    with closing(Pool(reward, "benchmark", workers=workers, timeout=60.0)) as pool:
        for future in [pool.submit(job) for job in first]:
            future.result()
        started = time.perf_counter()
        results = [future.result()[0] for future in [pool.submit(job) for job in jobs]]
        seconds = time.perf_counter() - started
    correct = sum(r.score is not None and r.score.success for r in results)
    unscored = sum(r.score is None for r in results)
    return {
        "completions": len(jobs), "per_second": len(jobs) / seconds, "correct": correct,
        "unscored": unscored,
    }  # fmt: skip


class Slow:
    """A reward that takes a tenth of a second per completion, as a remote judge would."""

    quick, version, bounds = False, 1, (0.0, 1.0)

    def __call__(self, prompt: Prompt, text: str) -> Score:
        time.sleep(0.1)
        return Score(reward=1.0, success=True)


def beside_sampling() -> dict[str, float]:
    """Time sampling with an instant reward and with a slow one."""
    config = resolve(load_config("arithmetic", ["rollout.prompts_per_step=32", "evaluate.every=0"]))
    parts = Run.build(config)
    prompts = encode_prompts(parts.policy.model, parts.prompts[:32])
    seconds: dict[str, float] = {}
    slow = Pool(_importable_slow(), "slow", workers=2, timeout=60.0)
    with closing(slow):
        slow.start()
        for round_number in range(3):
            for name, scorer in (("quick", InlineScorer(parts.scorer.reward)), ("slow", slow)):  # type: ignore[attr-defined]
                collector = Collector(engine=parts.engine, model=parts.policy.model, scorer=scorer)
                collected = collector.collect(prompts, sampling=parts.sampling, step=round_number)
                best = seconds.get(name, float("inf"))
                seconds[name] = min(best, collected.rollout_seconds)
    return {
        "sampling_seconds_quick_reward": seconds["quick"],
        "sampling_seconds_slow_reward": seconds["slow"],
        "slow_reward_seconds_total": 0.1 * 32 * parts.sampling.group_size,
    }


def _importable_slow() -> Reward:
    # A worker process cannot import from the main script.
    import importlib
    import sys

    sys.path.insert(0, str(Path(__file__).parent))
    slow: Reward = importlib.import_module("rewards").Slow()
    return slow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    workers = arguments.workers
    found = {
        "environment": described(0, "cpu", 1),
        "versions": {name: version(name) for name in ("math-verify", "sympy")},
        "workers": workers,
        "numbers": rate(MathAnswer(), numbers, 20_000, workers),
        "formulas": rate(MathAnswer(), formulas, 1_500, workers),
        "equations": rate(MathAnswer(), equations, 800, workers),
        "intervals": rate(MathAnswer(), intervals, 100, workers),
        "programs": rate(CodeTests(), programs, 96, workers),
        "sampling": beside_sampling(),
    }
    print(json.dumps(found, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
