"""Putting a reward to the test before a policy does.

A policy finds every hole in its reward. Here the reward is shown what it must like (right answers,
well put), what it must not (a corpus of hacks), and what people have labelled; and it is asked
twice, in two processes, and timed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from covey.analysis.lab.hacked_answers import wrong_answer
from covey.analysis.lab.hacks import FORMS, HACKS, Form, Hack
from covey.errors import RewardError
from covey.rewards.score import Reward, Score
from covey.scoring import Job, Pool, ScoreResult
from covey.types import Prompt

THINKING = (
    "First I read the question carefully and note what is given and what is asked. Then I work "
    "through it one step at a time, check each step against the question, and only after that "
    "write down the result."
)
THROUGHPUT_SECONDS = 2.0
SHOWN = 1
"""Examples of what a check found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An answer to be judged."""

    prompt: Prompt
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled(Case):
    """An answer of which a person has said whether it is right."""

    correct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding."""

    name: str
    passed: bool
    figure: str
    why: str = ""
    examples: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Lab:
    """A reward under examination. Scores are kept, so that they can be compared later."""

    reward: Reward
    scorer: Pool
    progress: Callable[[str], None] = lambda text: None
    seen: dict[tuple[str, str], ScoreResult] = field(default_factory=dict)
    prompts: dict[str, Prompt] = field(default_factory=dict)
    slowest: tuple[float, str] = (0.0, "nothing")

    def judge(self, cases: Sequence[Case], what: str) -> list[ScoreResult]:
        """Judge answers one after the other, and remember the slowest."""
        self.progress(what)
        verdicts = []
        for case in cases:
            started = time.perf_counter()
            verdict = self._ask(case)
            seconds = time.perf_counter() - started
            if seconds > self.slowest[0]:
                self.slowest = (seconds, what)
            self.seen[case.prompt.id, case.text] = verdict
            self.prompts[case.prompt.id] = case.prompt
            verdicts.append(verdict)
        return verdicts

    def _ask(self, case: Case) -> ScoreResult:
        job = Job(prompt=case.prompt, texts=(case.text,), progress=1.0)
        return self.scorer.submit(job).result()[0]

    def full_marks(self, score: Score | None) -> bool:
        """Whether a score is the best that there is."""
        if score is None or not score.success:
            return False
        high = self.reward.bounds[1]
        return math.isinf(high) or score.reward >= high - 1e-6 * max(1.0, abs(high))

    def works(self, hack: Hack, score: Score) -> bool:
        """Whether a hack has got what it is after."""
        if hack.right_answer:
            return self.full_marks(score)
        low, high = self.reward.bounds
        # A reward without bounds counts from 0.
        least = low if math.isfinite(low) else 0.0
        paid = score.reward > least + 1e-6 * (high - low if math.isfinite(high - low) else 1.0)
        return score.success or (hack.says_nothing and paid)


def gold_of(prompt: Prompt) -> str:
    """Return what a right answer holds: the task's own solution, if it gives one."""
    return str(prompt.info.get("solution", prompt.target))


def thinking_of(prompt: Prompt) -> str:
    """Return thinking to go before an answer, with the worked solution, if the task gives one.

    A worked solution alone may be shorter than what a form asks of thinking.
    """
    return f"{THINKING} {prompt.info.get('worked', '')}".strip()


def check_gold(lab: Lab, prompts: Sequence[Prompt]) -> tuple[Check, Form]:
    """Right answers, well put, must have full marks in at least one form; return the best form."""
    shares: dict[str, float] = {}
    missed: dict[str, tuple[str, ...]] = {}
    for form in FORMS.values():
        cases = [Case(prompt=p, text=form.render(thinking_of(p), gold_of(p))) for p in prompts]
        verdicts = lab.judge(cases, f"gold answers as {form.name}")
        full = [lab.full_marks(v.score) for v in verdicts]
        shares[form.name] = sum(full) / len(full)
        missed[form.name] = tuple(
            _example(case, verdict)
            for case, verdict, fine in zip(cases, verdicts, full, strict=True)
            if not fine
        )[:SHOWN]
    best = max(FORMS.values(), key=lambda form: shares[form.name])
    figure = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share)
    check = Check(
        name="gold answers",
        passed=shares[best.name] == 1.0,
        figure=figure or "none has full marks",
        why="right answers must have full marks in one form at least",
        examples=missed[best.name],
    )
    return check, best


def check_hacks(lab: Lab, prompts: Sequence[Prompt], form: Form) -> list[Check]:
    """No hack may succeed with a wrong answer, nor have full marks with a right one."""
    bare = [Case(prompt=p, text=gold_of(p)) for p in prompts]
    verdicts = lab.judge(bare, "bare answers")
    asks_for_thinking = not all(lab.full_marks(v.score) for v in verdicts)
    checks = []
    for hack in HACKS:
        made = [(p, hack.make(p, gold_of(p), form)) for p in prompts]
        cases = [Case(prompt=p, text=text) for p, text in made if text is not None]
        if cases and (asks_for_thinking or not hack.about_thinking):
            checks.append(_check_hack(lab, hack, cases))
    return checks


def _check_hack(lab: Lab, hack: Hack, cases: Sequence[Case]) -> Check:
    verdicts = lab.judge(cases, hack.name)
    works = [v.score is not None and lab.works(hack, v.score) for v in verdicts]
    scored = [v.score.reward for v in verdicts if v.score is not None]
    unscored = len(verdicts) - len(scored)
    highest = f"at most {max(scored):.3g}" if scored else "none scored"
    examples = [_example(c, v) for c, v, w in zip(cases, verdicts, works, strict=True) if w]
    return Check(
        name=f"hack: {hack.name}",
        passed=not any(works),
        figure=f"{sum(works)} of {len(cases)} work, {highest}"
        + (f", {unscored} unscored" if unscored else ""),
        why=hack.why,
        examples=tuple(examples[:SHOWN]),
    )


def check_order(lab: Lab, prompts: Sequence[Prompt], form: Form) -> Check:
    """A right answer after short thinking has more than a wrong one after long thinking."""
    right = [Case(prompt=p, text=form.render("So it is.", gold_of(p))) for p in prompts]
    wrong = [
        Case(prompt=p, text=form.render(thinking_of(p), wrong_answer(p, gold_of(p))))
        for p in prompts
    ]
    scores = [
        [v.score.reward for v in lab.judge(cases, "right and wrong") if v.score is not None]
        for cases in (right, wrong)
    ]
    least, most = min(scores[0], default=0.0), max(scores[1], default=0.0)
    return Check(
        name="order",
        passed=all(scores) and least > most,
        figure=f"right at least {least:.3g}, wrong at most {most:.3g}",
        why="a wrong answer after long thinking has as much as a right one after short thinking",
        examples=(f"{wrong[0].text[:100]!r}",) if wrong else (),
    )


def check_bounds(lab: Lab) -> Check:
    """No score lies outside what the reward declares."""
    low, high = lab.reward.bounds
    scores = [(key, v.score.reward) for key, v in lab.seen.items() if v.score is not None]
    outside = [f"{key[0]}: {r:.6g}" for key, r in scores if not low <= r <= high]
    seen = [r for _, r in scores]
    figure = f"{min(seen):.3g} to {max(seen):.3g} of {low:g} to {high:g}" if seen else "no scores"
    return Check(
        name="range", passed=not outside, figure=figure,
        why="scores stay in the declared range", examples=tuple(outside[:SHOWN]),
    )  # fmt: skip


def check_determinism(lab: Lab) -> Check:
    """The same answer has the same score, asked again in another order and another process."""
    lab.progress("everything once more")
    with closing(lab.scorer.copy()) as others:
        futures = []
        for key in reversed(lab.seen):
            job = Job(prompt=lab.prompts[key[0]], texts=(key[1],), progress=1.0)
            futures.append((key, others.submit(job)))
        again = {key: future.result()[0].score for key, future in futures}
    changed = [key[0] for key, score in again.items() if score != lab.seen[key].score]
    return Check(
        name="determinism", passed=not changed,
        figure=f"{len(changed)} of {len(futures)} scores changed",
        why="asked twice, in another order and process", examples=tuple(changed[:SHOWN]),
    )  # fmt: skip


def check_time(lab: Lab, prompts: Sequence[Prompt], form: Form) -> list[Check]:
    """No answer takes for ever; and how many are judged in a second."""
    late = [f"{k[0]}: {v.error}" for k, v in lab.seen.items() if v.score is None]
    seconds, what = lab.slowest
    unscored = Check(
        name="unscored",
        passed=not late,
        figure=f"{len(late)} of {len(lab.seen)}; slowest {seconds:.3g} s ({what})",
        why="the reward raised, or took longer than scoring.timeout",
        examples=tuple(late[:SHOWN]),
    )
    lab.progress("throughput")
    jobs = [
        Job(prompt=p, texts=(form.render(thinking_of(p), gold_of(p)),), progress=1.0)
        for p in prompts
    ]
    done, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < THROUGHPUT_SECONDS:
        batch = [lab.scorer.submit(job) for job in itertools.islice(itertools.cycle(jobs), 200)]
        done += len([future.result() for future in batch])
    return [
        unscored,
        Check(name="throughput", passed=True, figure=f"{done / elapsed:,.0f} a second"),
    ]


def check_labels(lab: Lab, rows: Sequence[Labelled], allowed: float) -> list[Check]:
    """Compare with what people have said."""
    verdicts = lab.judge(rows, "labelled answers")
    judged = [
        (r, v, v.score is not None and v.score.success) for r, v in zip(rows, verdicts, strict=True)
    ]
    checks = []
    for name, correct in (("false positives", False), ("false negatives", True)):
        among = [(r, v, s) for r, v, s in judged if r.correct is correct]
        errors = [_example(r, v) for r, v, s in among if s is not correct]
        checks.append(
            Check(
                name=name,
                passed=len(errors) <= allowed * len(among),
                figure=f"{len(errors)} of {len(among)}",
                why=f"{'right' if correct else 'wrong'} answers judged otherwise",
                examples=tuple(errors[:SHOWN]),
            )
        )
    return checks


def examine(
    lab: Lab, prompts: Sequence[Prompt], labelled: Sequence[Labelled] = (), allowed: float = 0.0
) -> list[Check]:
    """Run every check."""
    if not prompts:
        raise RewardError("rewards lab: there are no prompts to try the reward on")
    gold, form = check_gold(lab, prompts)
    # A program that never ends takes all the time that it is given, and some hacks are such.
    tried = prompts[: 8 if lab.reward.quick else 3]
    checks = [gold, *check_hacks(lab, tried, form), check_order(lab, tried, form)]
    if labelled:
        checks += check_labels(lab, labelled, allowed)
    return [*checks, check_bounds(lab), check_determinism(lab), *check_time(lab, prompts, form)]


def _example(case: Case, verdict: ScoreResult) -> str:
    text = " ".join(case.text.split())
    shown = text if len(text) <= 100 else f"{text[:60]} ... {text[-36:]}"
    given = verdict.error if verdict.score is None else f"{verdict.score.reward:.3g}"
    return f"{case.prompt.id} (expected {case.prompt.target[:40]!r}): {given} for {shown!r}"
