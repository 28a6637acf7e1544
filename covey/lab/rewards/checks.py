"""The checks of the reward lab, which find flaws in a reward before a policy exploits them.

The reward lab scores correct completions and a corpus of reward hacks. Only correct completions may
get the full reward. The lab scores each completion twice, in two processes, and measures the time.
The lab can compare the scores with human labels.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from covey.baselines import REMEDY, baselines
from covey.errors import RewardError
from covey.lab.rewards.cases import Case
from covey.lab.rewards.hacked_answers import wrong_answer
from covey.lab.rewards.hacks import HACKS, Hack
from covey.rewards.format import FORMATS, THINKING, Format
from covey.rewards.score import Reward, Score
from covey.scoring import Job, Pool, ScoreResult
from covey.types import Prompt

THROUGHPUT_SECONDS = 2.0
FEW_SLOW = 16
"""The number of prompts on which trivial completions are scored if the reward is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check of a reward."""

    name: str
    passed: bool
    figure: str
    why: str = ""
    examples: tuple[str, ...] = ()


def _check(name: str, figure: str, why: str, failures: Sequence[str], allowed: float = 0) -> Check:
    """Return a check that passes with at most `allowed` failures, and shows the first failure."""
    return Check(
        name=name,
        passed=len(failures) <= allowed,
        figure=figure,
        why=why,
        examples=tuple(failures[:1]),
    )


@dataclass(slots=True, kw_only=True)
class Lab:
    """A reward under test, with all its scores so far."""

    reward: Reward
    scorer: Pool
    progress: Callable[[str], None] = lambda text: None
    seen: dict[tuple[str, str], ScoreResult] = field(default_factory=dict)
    prompts: dict[str, Prompt] = field(default_factory=dict)
    slowest: tuple[float, str] = (0.0, "nothing")

    def score(self, cases: Sequence[Case], what: str) -> list[ScoreResult]:
        """Score completions one by one, and store the longest scoring time."""
        self.progress(what)
        results = []
        for case in cases:
            started = time.perf_counter()
            (result,) = self.scorer.submit(_job(case.prompt, case.text)).result()
            self.slowest = max(self.slowest, (time.perf_counter() - started, what))
            self.seen[case.prompt.id, case.text] = result
            self.prompts[case.prompt.id] = case.prompt
            results.append(result)
        return results

    def full_reward(self, score: Score | None) -> bool:
        """Return whether a score is a success and has the highest reward."""
        if score is None or not score.success:
            return False
        high = self.reward.bounds[1]
        return math.isinf(high) or score.reward >= high - 1e-6 * max(1.0, abs(high))

    def works(self, hack: Hack, score: Score) -> bool:
        """Return whether a hack works, which means that the reward has a flaw."""
        if hack.correct_answer:
            return self.full_reward(score)
        low, high = self.reward.bounds
        # Without bounds, 0 counts as the lowest reward.
        least = low if math.isfinite(low) else 0.0
        paid = score.reward > least + 1e-6 * (high - low if math.isfinite(high - low) else 1.0)
        return score.success or (hack.says_nothing and paid)


def _job(prompt: Prompt, text: str) -> Job:
    return Job(prompt=prompt, texts=(text,), progress=1.0)


def solution_of(prompt: Prompt) -> str:
    """Return the prompt's solution if it has one, and otherwise its target."""
    return str(prompt.info.get("solution", prompt.target))


def _thinking(prompt: Prompt) -> str:
    """Return a long thinking text, which includes the worked solution if the task has one.

    Because some formats require long thinking, the text starts with sentences that fit any task.
    """
    return f"{THINKING} {prompt.info.get('worked', '')}".strip()


def _correct(prompt: Prompt, form: Format) -> Case:
    return Case(prompt=prompt, text=form.render(_thinking(prompt), solution_of(prompt)))


def check_correct(lab: Lab, prompts: Sequence[Prompt]) -> tuple[Check, Format]:
    """Check that correct completions get the full reward in at least one format.

    Return the check, and the format in which the most completions get the full reward.
    """
    shares: dict[str, float] = {}
    missed: dict[str, list[str]] = {}
    for form in FORMATS.values():
        cases = [_correct(prompt, form) for prompt in prompts]
        results = lab.score(cases, f"correct completions as {form.name}")
        missed[form.name] = [
            _example(case, result)
            for case, result in zip(cases, results, strict=True)
            if not lab.full_reward(result.score)
        ]
        shares[form.name] = 1 - len(missed[form.name]) / len(cases)
    best = max(FORMATS.values(), key=lambda form: shares[form.name])
    figure = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share)
    why = "correct completions must get the full reward in at least one format"
    figure = figure or "none gets the full reward"
    return _check("correct completions", figure, why, missed[best.name]), best


def check_hacks(lab: Lab, prompts: Sequence[Prompt], form: Format) -> list[Check]:
    """Check that hacks with a wrong answer fail, and that no hack gets the full reward."""
    bare = [Case(prompt=p, text=solution_of(p)) for p in prompts]
    results = lab.score(bare, "bare answers")
    needs_thinking = not all(lab.full_reward(result.score) for result in results)
    checks = []
    for hack in HACKS:
        made = [(p, hack.make(p, solution_of(p), form)) for p in prompts]
        cases = [Case(prompt=p, text=text) for p, text in made if text is not None]
        if cases and (needs_thinking or not hack.about_thinking):
            checks.append(_check_hack(lab, hack, cases))
    return checks


def _check_hack(lab: Lab, hack: Hack, cases: Sequence[Case]) -> Check:
    results = lab.score(cases, hack.name)
    works = [
        _example(case, result)
        for case, result in zip(cases, results, strict=True)
        if result.score is not None and lab.works(hack, result.score)
    ]
    rewards = [result.score.reward for result in results if result.score is not None]
    highest = f"at most {max(rewards):.3g}" if rewards else "none scored"
    unscored = len(results) - len(rewards)
    figure = f"{len(works)} of {len(cases)} work, {highest}"
    figure += f", {unscored} unscored" if unscored else ""
    return _check(f"hack: {hack.name}", figure, f"the reward {hack.why}", works)


def check_order(lab: Lab, prompts: Sequence[Prompt], form: Format) -> Check:
    """Check that a short correct completion scores higher than a long wrong completion."""
    correct = [Case(prompt=p, text=form.render("So it is.", solution_of(p))) for p in prompts]
    wrong = [
        Case(prompt=p, text=form.render(_thinking(p), wrong_answer(p, solution_of(p))))
        for p in prompts
    ]
    rewards = [
        [r.score.reward for r in lab.score(cases, "correct and wrong") if r.score is not None]
        for cases in (correct, wrong)
    ]
    least, most = min(rewards[0], default=0.0), max(rewards[1], default=0.0)
    return _check(
        "order",
        f"correct at least {least:.3g}, wrong at most {most:.3g}",
        "a wrong answer after long thinking scores as high as a correct one after short thinking",
        [] if all(rewards) and least > most else [f"{case.text[:100]!r}" for case in wrong[:1]],
    )


def check_baselines(lab: Lab, prompts: Sequence[Prompt]) -> Check:
    """Check that constant answers, empty completions and copies of the prompt rarely succeed."""
    lab.progress("baselines")
    found = baselines(prompts, lab.scorer, None if lab.reward.quick else FEW_SLOW)
    return _check("baselines", found.text(), f"shortcuts on this task: {REMEDY}", found.flagged())


def check_bounds(lab: Lab) -> Check:
    """Check that all rewards are within the bounds that the reward function declares."""
    low, high = lab.reward.bounds
    rewards = {key: r.score.reward for key, r in lab.seen.items() if r.score is not None}
    outside = [f"{key[0]}: {r:.6g}" for key, r in rewards.items() if not low <= r <= high]
    figure = "no scores"
    if rewards:
        lowest, highest = min(rewards.values()), max(rewards.values())
        figure = f"{lowest:.3g} to {highest:.3g} of {low:g} to {high:g}"
    return _check("range", figure, "rewards must stay in the declared bounds", outside)


def check_determinism(lab: Lab) -> Check:
    """Check that scores do not depend on the order of completions or on the process."""
    lab.progress("everything once more")
    with closing(lab.scorer.copy()) as others:
        futures = {
            key: others.submit(_job(lab.prompts[key[0]], key[1])) for key in [*lab.seen][::-1]
        }
        again = {key: future.result()[0].score for key, future in futures.items()}
    changed = [key[0] for key, score in again.items() if score != lab.seen[key].score]
    figure = f"{len(changed)} of {len(again)} scores changed"
    return _check("determinism", figure, "scored twice, in another order and process", changed)


def check_time(lab: Lab, prompts: Sequence[Prompt], form: Format) -> list[Check]:
    """Check that scoring raises no error or timeout, and measure the scoring speed."""
    unscored = [f"{k[0]}: {r.error}" for k, r in lab.seen.items() if r.score is None]
    seconds, what = lab.slowest
    figure = f"{len(unscored)} of {len(lab.seen)}; slowest {seconds:.3g} s ({what})"
    why = "the reward raised an error, or took longer than scoring.timeout"
    lab.progress("throughput")
    jobs = [_job(p, _correct(p, form).text) for p in prompts]
    done, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < THROUGHPUT_SECONDS:
        batch = [lab.scorer.submit(job) for job in itertools.islice(itertools.cycle(jobs), 200)]
        done += len([future.result() for future in batch])
    return [
        _check("unscored", figure, why, unscored),
        Check(name="throughput", passed=True, figure=f"{done / elapsed:,.0f} per second"),
    ]


def check_labels(lab: Lab, cases: Sequence[Case], allowed: float) -> list[Check]:
    """Check that the `success` of a score agrees with human labels."""
    results = lab.score(cases, "labelled completions")
    checks = []
    for name, label in (("false positives", False), ("false negatives", True)):
        among = [(c, r) for c, r in zip(cases, results, strict=True) if c.correct is label]
        errors = [
            _example(case, result)
            for case, result in among
            if (result.score is not None and result.score.success) is not label
        ]
        figure = f"{len(errors)} of {len(among)}"
        why = f"completions labelled {'correct' if label else 'wrong'} but scored otherwise"
        checks.append(_check(name, figure, why, errors, allowed * len(among)))
    return checks


def examine(
    lab: Lab, prompts: Sequence[Prompt], labelled: Sequence[Case] = (), allowed: float = 0.0
) -> list[Check]:
    """Run every check."""
    if not prompts:
        raise RewardError("rewards lab: the task has no held-out prompts to test the reward on")
    correct, form = check_correct(lab, prompts)
    # Some hacks are programs that run until their time limit.
    tried = prompts[: 8 if lab.reward.quick else 3]
    checks = [correct, *check_hacks(lab, tried, form), check_order(lab, tried, form)]
    checks.append(check_baselines(lab, prompts))
    if labelled:
        checks += check_labels(lab, labelled, allowed)
    return [*checks, check_bounds(lab), check_determinism(lab), *check_time(lab, prompts, form)]


def _example(case: Case, result: ScoreResult) -> str:
    text = " ".join(case.text.split())
    shown = text if len(text) <= 100 else f"{text[:60]} ... {text[-36:]}"
    outcome = result.error if result.score is None else f"{result.score.reward:.3g}"
    return f"{case.prompt.id} (target {case.prompt.target[:40]!r}): {outcome} for {shown!r}"
