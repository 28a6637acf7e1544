"""Scoring in processes changes when completions are scored, and nothing else."""

from __future__ import annotations

import importlib
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from covey.cli.main import run as covey
from covey.config import load_config
from covey.config.resolve import resolve
from covey.errors import RewardError
from covey.loop import train
from covey.records.folder import RunFolder
from covey.records.resume import start_of
from covey.rewards import as_reward
from covey.rewards.format import ThinkAnswerForm
from covey.rewards.math_answer import MathAnswer
from covey.rewards.mix import Mix
from covey.rewards.registry import make_reward
from covey.run import Run
from covey.scoring import Job, Pool, ScoreResult, make_scorer
from covey.stopping import StopSignal
from covey.types import Prompt
from tests.processes import wait_until
from tests.trackers import Notes

QUICK = (
    "model.device=cpu", "train.steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4",
    "evaluate.every=0", "scoring.workers=2",
)  # fmt: skip

# Scoring processes import it too, and it is quick to import, as this file is not.
REWARDS = '''
import asyncio, os, time, zlib

def value(text):
    """A number that looks random and depends on the text alone."""
    return zlib.crc32(text.encode()) % 1000 / 1000

def plain(prompt, text):
    return value(text)

async def waits(prompt, text):
    await asyncio.sleep(value(text) / 20)
    return value(text)

def of_group(completions, answer, prompts, **columns):
    assert len(set(prompts)) == len(set(answer)) == 1
    highest = max(value(c) for c in completions)
    return [value(c) - highest for c in completions]

async def of_group_waits(completions, **columns):
    await asyncio.sleep(value(completions[0]) / 20)
    return of_group(completions, **columns)

def some_none(completions, **columns):
    return [None if value(c) < 0.3 else value(c) for c in completions]

class Quick:
    """The same values in the trainer's own process."""
    quick, version, bounds = True, 1, (-1.0, 1.0)
    def __init__(self, *, group: bool = False):
        self.whole_groups = group
    def __call__(self, prompt, text):
        from covey.rewards import Score
        return Score(reward=value(text), success=False)
    def score_group(self, prompt, texts):
        from covey.rewards import Score
        many = len(texts)
        rewards = of_group(texts, [prompt.target] * many, [prompt.text] * many)
        return [Score(reward=r, success=False) for r in rewards]

def patient(prompt, text, *, folder):
    """Waits until all completions are there, and leaves a file for each that it has begun."""
    open(os.path.join(folder, f"begun-{value(text)}"), "w").close()
    while not os.path.exists(os.path.join(folder, "sampled")):
        time.sleep(0.01)
    return value(text)

def fails(prompt, text, *, how, below=0.2):
    if value(text) >= below:
        return value(text)
    if how == "raises":
        raise KeyError("no such thing")
    if how == "dies":
        os._exit(9)
    time.sleep(1000)

class Constant:
    quick, version, bounds = True, 1, (0.0, 1.0)
    def __call__(self, prompt, text):
        from covey.rewards import Score
        return Score(reward=1.0, success=True)

def closes(prompt, text):
    if text != "close":
        return 1.0
    os.closerange(3, 100)
    time.sleep(1000)

def unnamed_signal(prompt, text):
    if text == "signal":
        os.kill(os.getpid(), 40)
    return 1.0

def garbles(prompt, text):
    if text == "garble":
        for fd in range(3, 400):
            try:
                os.write(fd, b"\\x00\\x00\\x00\\x05hello")
            except OSError:
                pass
    return 1.0

def odd_parts(prompt, text):
    import numpy
    from covey.rewards import Score
    parts = {"small": numpy.float32(0.5), "flag": numpy.bool_(True)}
    if text == "bad part":
        parts["small"] = numpy.float32("nan")
    return Score(reward=numpy.float32(0.25), success=numpy.bool_(True), parts=parts)

class TooFew:
    """Says that it scores groups, and always gives one score."""
    quick, version, bounds, whole_groups = True, 1, (0.0, 1.0), True
    def score_group(self, prompt, texts):
        from covey.rewards import Score
        return [Score(reward=1.0, success=True)]
    def __call__(self, prompt, text):
        return self.score_group(prompt, [text])[0]
'''


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A user's module of rewards, called `judged`."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "judged.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("judged")
    sys.path.remove(str(folder))
    del sys.modules["judged"]


def parts_with(*settings: str) -> Run:
    return Run.build(resolve(load_config("arithmetic", [*QUICK, *settings])))


def trained(
    path: Path, *settings: str, reporter: Notes | None = None
) -> tuple[RunFolder, list[str]]:
    """Train, and return the run and what was noted."""
    parts, reporter = parts_with(*settings), reporter or Notes()
    run = RunFolder.create(path, "", {})
    with closing(parts.scorer):
        train(parts, run, [reporter], StopSignal())
    return run, reporter.notes


def column(run: RunFolder, name: str) -> list[Any]:
    """Return a column of all rollouts, step after step."""
    return [row[name] for metrics in run.steps() for row in run.rollouts(metrics["step"])]


def without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in names and not k.startswith("time/")}


def fours(values: list[Any]) -> list[list[Any]]:
    """Return the groups of a step."""
    return [values[at : at + 4] for at in range(0, len(values), 4)]


def processes() -> list[str]:
    """Return the command lines of the scoring processes that this process has."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            stat = (folder / "stat").read_text().rsplit(") ", 1)[1].split()
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if stat[0] != "Z" and int(stat[1]) == os.getpid() and "covey.workers" in words:
            found.append(" ".join(words))
    return found


PROMPT = Prompt(id="p/1", task="t", messages=({"role": "user", "content": "1+1?"},), target="2")


def job(*texts: str) -> Job:
    return Job(prompt=PROMPT, texts=texts, progress=1.0)


def given(verdicts: Sequence[ScoreResult]) -> list[float | None]:
    return [None if v.score is None else v.score.reward for v in verdicts]


# Where and when completions are scored makes no difference.


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("plain", "false"),
        ("waits", "false"),
        ("of_group", "true"),
        ("of_group_waits", "true"),
    ],
)
def test_processes_give_the_same_run_as_scoring_in_this_process(
    name: str, here: str, judged: ModuleType, tmp_path: Path
) -> None:
    far, _ = trained(tmp_path / "far", f"reward.name=judged:{name}")
    texts, rewards = column(far, "text"), column(far, "reward")
    assert len(texts) == 32
    direct = [judged.value(text) for text in texts]
    if here == "true":
        direct = [v - max(group) for group in fours(direct) for v in group]
    assert rewards == direct
    assert len(set(rewards)) > 10

    near, _ = trained(tmp_path / "near", "reward.name=judged.Quick", f"reward.group={here}")
    assert [without(m, "reward_id") for m in far.steps()] == [
        without(m, "reward_id") for m in near.steps()
    ]
    for step in (1, 2):
        assert [without(r, "reward_id") for r in far.rollouts(step)] == [
            without(r, "reward_id") for r in near.rollouts(step)
        ]
    weights = [r.checkpoints()[-1][1] / "model.safetensors" for r in (far, near)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_number_of_processes_makes_no_difference(judged: ModuleType, tmp_path: Path) -> None:
    one, _ = trained(tmp_path / "one", "reward.name=judged:plain", "scoring.workers=1")
    many, _ = trained(tmp_path / "many", "reward.name=judged:plain", "scoring.workers=8")
    assert column(one, "reward") == column(many, "reward")
    assert [without(m) for m in one.steps()] == [without(m) for m in many.steps()]
    assert processes() == []


class KillsAWorker(Notes):
    """Kills a scoring process after the first step."""

    def __init__(self, parts: Run) -> None:
        super().__init__()
        self.parts = parts

    def step(self, metrics: Mapping[str, Any]) -> None:
        if metrics["step"] == 1:
            for worker in [lane.worker for lane in self.parts.scorer.pool.lanes if lane.worker]:
                os.kill(worker.process.pid, signal.SIGKILL)


def test_a_run_goes_on_when_its_scoring_processes_are_killed(
    judged: ModuleType, tmp_path: Path
) -> None:
    settings = ("reward.name=judged:plain", "scoring.workers=2", "train.steps=3")
    plain, _ = trained(tmp_path / "plain", *settings)
    parts = parts_with(*settings)
    killer, run = KillsAWorker(parts), RunFolder.create(tmp_path / "killed", "", {})
    with closing(parts.scorer):
        train(parts, run, [killer], StopSignal())
    assert column(run, "reward") == column(plain, "reward")
    assert [m["rollout/trained_groups"] for m in run.steps()] == [4, 4, 4]
    died = sum(m.get("scoring/restarts", 0) for m in run.steps())
    assert died == sum("a scoring process ended by signal SIGKILL" in n for n in killer.notes) > 0
    weights = [r.checkpoints()[-1][1] / "model.safetensors" for r in (plain, run)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


class TellsWhenSampled(Notes):
    """Holds the last completion of a step until scoring has begun, then says that all are there."""

    def __init__(self, folder: Path, answers: int) -> None:
        super().__init__()
        self.folder, self.missing = folder, answers

    def sampled(self, answers: int) -> None:
        self.missing -= answers
        if self.missing == 0:
            wait_until(lambda: any(self.folder.glob("begun-*")))
            (self.folder / "sampled").touch()


def test_generation_and_scoring_do_not_wait_for_each_other(
    judged: ModuleType, tmp_path: Path
) -> None:
    # If one waited for the other, both would wait for ever, and no completion would have a reward.
    instant, _ = trained(tmp_path / "instant", "reward.name=judged.Quick", "train.steps=1")
    late, notes = trained(
        tmp_path / "late", "reward.name=judged:patient", f"reward.folder={tmp_path}",
        "train.steps=1", reporter=TellsWhenSampled(tmp_path, answers=16),
    )  # fmt: skip
    assert notes == []
    assert column(late, "reward") == column(instant, "reward")


# Completions that cannot be scored.


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raises", "KeyError: 'no such thing'"),
        ("dies", "the scoring process ended with code 9"),
        ("hangs", "took longer than 0.4 seconds"),
    ],
)
def test_completions_that_cannot_be_scored_are_left_out_of_their_group(
    how: str, why: str, judged: ModuleType, tmp_path: Path
) -> None:
    run, notes = trained(
        tmp_path / "run", "reward.name=judged:fails", f"reward.how={how}", "scoring.timeout=0.4",
        "scoring.max_unscored=0.9", "train.steps=1",
    )  # fmt: skip
    (metrics,), rows = run.steps(), run.rollouts(1)
    expected = [judged.value(row["text"]) for row in rows]
    expected = [None if value < 0.2 else value for value in expected]
    lost = expected.count(None)
    assert 2 <= lost <= 8
    assert [row["reward"] for row in rows] == expected
    assert metrics["objective/unscored"] == lost
    assert metrics["objective/scores"] == pytest.approx(
        statistics.mean(v for v in expected if v is not None)
    )
    first = next(row for row in rows if row["reward"] is None)
    (note,) = notes
    what = f"step 1: {lost} unscored, {first['prompt_id']} sample {first['sample']}: {why}"
    assert note.startswith(what)
    assert ("judged.py, line " in note) == (how == "raises")
    compared = 0
    for group in fours(rows):
        scored = [row for row in group if row["reward"] is not None]
        rewards = [row["reward"] for row in scored]
        if len(scored) < 2:
            continue
        mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
        assert [row["advantage"] for row in scored] == pytest.approx(
            [(r - mean) / (deviation + 1e-6) for r in rewards], abs=1e-5
        )
        assert all(row["advantage"] == 0.0 for row in group if row["reward"] is None)
        compared += len(scored) < 4
    assert compared >= 1
    assert processes() == []


@pytest.mark.parametrize("how", ["raises", "dies", "hangs"])
def test_too_many_of_them_end_the_run_with_a_line(
    how: str, judged: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = (*QUICK, "reward.name=judged:fails", f"reward.how={how}", "reward.below=0.8",
                "scoring.timeout=0.2")  # fmt: skip
    overrides = [word for setting in settings for word in ("--set", setting)]
    assert covey(["train", "--run", str(tmp_path / "run"), *overrides]) == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("covey: reward: ")
    assert "of 16 completions could not be scored" in error
    assert "scoring.max_unscored = 0.1" in error
    assert processes() == []
    assert not (tmp_path / "run/steps.jsonl").exists()


def test_a_time_limit_that_nothing_meets_ends_the_run(judged: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="no group has two scored completions"):
        trained(
            tmp_path / "run", "reward.name=judged:fails", "reward.how=hangs", "reward.below=2.0",
            "scoring.timeout=1e-6", "scoring.max_unscored=1.0", "rollout.prompts_per_step=2", "rollout.group_size=2",
        )  # fmt: skip
    assert processes() == []


def test_none_from_a_group_reward_costs_one_score_and_not_the_group(
    judged: ModuleType, tmp_path: Path
) -> None:
    run, _ = trained(tmp_path / "run", "reward.name=judged:some_none", "scoring.max_unscored=0.9")
    direct = [judged.value(text) for text in column(run, "text")]
    assert column(run, "reward") == [None if v < 0.3 else v for v in direct]
    assert 0 < run.steps()[0]["objective/unscored"] < 16


def test_a_wrong_number_of_scores_is_a_failure_and_no_crash(judged: ModuleType) -> None:
    scorer = make_scorer("too_few", judged.TooFew())
    verdicts = scorer.submit(job("a", "b", "c")).result()
    assert given(verdicts) == [None] * 3
    assert verdicts[0].error == "ValueError: there are 1 scores for 3 completions"


def test_scores_come_back_as_plain_numbers(judged: ModuleType) -> None:
    with closing(make_scorer("odd", as_reward(judged.odd_parts), workers=1, timeout=20)) as scorer:
        good = scorer.submit(job("x")).result()[0].score
        bad = scorer.submit(job("bad part")).result()[0]
    assert good is not None
    text = json.dumps([good.reward, good.success, dict(good.parts)])
    assert text == '[0.25, true, {"small": 0.5, "flag": 1.0}]'
    assert bad.error == "ValueError: the part small is nan"


# A pool returns a result for every job, whatever happens to its processes.


@pytest.mark.parametrize(
    ("name", "word", "why"),
    [
        ("unnamed_signal", "signal", "the scoring process ended by signal 40"),
        ("closes", "close", "the scoring process ended the connection"),
        ("garbles", "garble", "the scoring process sent an invalid message"),
    ],
)
def test_a_process_that_dies_costs_one_score(
    name: str, word: str, why: str, judged: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.subprocesses.EXIT_SECONDS", 0.3)
    reward = as_reward(getattr(judged, name))
    with closing(Pool(reward, name, workers=1, timeout=10)) as pool:
        futures = [pool.submit(job(text)) for text in ("a", word, "b")]
        verdicts = [future.result(timeout=20)[0] for future in futures]
    assert given(verdicts) == [1.0, None, 1.0]
    assert verdicts[1].error.startswith(why)
    assert processes() == []


def user_module(folder: Path, name: str, text: str) -> ModuleType:
    (folder / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def test_a_module_that_ends_the_process_that_imports_it_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = user_module(tmp_path, "ends_processes", "def f(prompt, text): return 1.0\n")
    (tmp_path / "ends_processes.py").write_text("import os; os._exit(7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RewardError, match="cannot load the reward: it ended with code 7"):
        make_scorer("ends", as_reward(module.f), workers=3, timeout=5)
    assert processes() == []


def test_when_no_process_can_be_started_again_every_job_still_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os\ndef f(prompt, text):\n    return 1.0 if text == 'a' else os._exit(5)\n"
    module = user_module(tmp_path, "cannot_start_again", text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with closing(make_scorer("again", as_reward(module.f), workers=1, timeout=5)) as pool:
        assert given(pool.submit(job("a")).result(timeout=20)) == [1.0]
        (tmp_path / "cannot_start_again.py").write_text("raise OSError('gone')\n")
        futures = [pool.submit(job(text)) for text in ("b", "a", "a")]
        errors = [future.result(timeout=20)[0].error for future in futures]
    assert errors[0] == "the scoring process ended with code 5"
    assert all("cannot load the reward: OSError: gone" in error for error in errors[1:])


def test_closing_does_not_wait_for_a_process_that_is_slow_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = user_module(tmp_path, "slow_to_import", "def f(prompt, text): return 1.0\n")
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = Pool(as_reward(module.f), "slow", workers=2, timeout=5)
    failures: list[str] = []

    def start() -> None:
        try:
            pool.start()
        except RewardError as error:
            failures.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    wait_until(lambda: len(processes()) == 2)
    started = time.monotonic()
    pool.close()
    thread.join(timeout=30)
    assert time.monotonic() - started < 30  # importing the reward would take sixty seconds
    assert processes() == []
    assert len(failures) == 1
    assert "ended by signal SIGKILL" in failures[0]


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.3, 0.8])
def test_closing_at_any_moment_leaves_no_process_and_no_pending_job(
    pause: float, judged: ModuleType
) -> None:
    pool = Pool(as_reward(judged.fails, {"how": "dies", "below": 0.5}), "f", workers=8, timeout=5)
    futures = [pool.submit(job(str(n))) for n in range(200)]
    time.sleep(pause)
    pool.close()
    assert all(future.done() for future in futures)
    assert processes() == []


# Weights that change over a run.


def check_weights(run: RunFolder, weights: Callable[[float], dict[str, float]], steps: int) -> None:
    for step in range(1, steps + 1):
        now = weights((step - 1) / steps)
        for row in run.rollouts(step):
            expected = sum(weight * row["parts"][name] for name, weight in now.items())
            assert row["reward"] == pytest.approx(expected, abs=1e-12)
            prompt = Prompt(id="", task="", messages=PROMPT.messages, target=row["target"])
            assert row["parts"]["accuracy"] == MathAnswer()(prompt, row["text"]).reward


def test_weights_follow_the_share_of_the_run_that_is_done(tmp_path: Path) -> None:
    run, _ = trained(
        tmp_path / "run", "reward.name=mix", "reward.gated=false", "train.steps=3",
        "reward.parts={accuracy={name='math_answer', weight=0.9}, "
        "format={name='think_answer_form', weight=0.1}}",
        "reward.early={accuracy=0.3, format=0.7}", "reward.early_until=1.0",
    )  # fmt: skip
    check_weights(run, lambda t: {"accuracy": 0.3 + 0.6 * t, "format": 0.7 - 0.6 * t}, 3)
    for row in run.rollouts(2):
        prompt = Prompt(id="", task="", messages=PROMPT.messages, target=row["target"])
        assert row["parts"]["format"] == ThinkAnswerForm()(prompt, row["text"]).reward
    assert len({row["reward"] for row in run.rollouts(2)}) > 1


def test_a_template_gives_the_format_more_weight_early(tmp_path: Path) -> None:
    run, _ = trained(
        tmp_path / "run", "reward.name=math", "reward.gated=false", "reward.robust=false",
        "reward.early_format=0.5", "train.steps=3",
    )  # fmt: skip
    options = {"gated": False, "robust": False, "early_format": 0.5}
    template = make_reward("math", options)
    assert isinstance(template, Mix)
    formats = [template.at((step - 1) / 3).weights["format"] for step in (1, 2, 3)]
    assert formats == pytest.approx([0.5, 0.15, 0.15])  # a fifth of three steps is past
    for step in (1, 2, 3):
        now = template.at((step - 1) / 3)
        for row in run.rollouts(step):
            prompt = Prompt(id="", task="", messages=PROMPT.messages, target=row["target"])
            assert row["reward"] == pytest.approx(now(prompt, row["text"]).reward, abs=1e-12)


# The identity of the reward.


def test_every_rollout_and_every_step_names_its_reward(judged: ModuleType, tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run", "reward.name=judged:plain")
    (who,) = set(column(run, "reward_id"))
    assert who.startswith("judged:plain@1#")
    assert [metrics["reward_id"] for metrics in run.steps()] == [who, who]
    other, _ = trained(tmp_path / "other", "reward.name=judged:plain", "reward.success_at=0.5")
    (options_count,) = set(column(other, "reward_id"))
    assert options_count != who


# Rewards that are nearly equal within groups.


def test_a_finding_is_told_once_also_after_a_resume(judged: ModuleType, tmp_path: Path) -> None:
    settings = (
        "reward.name=judged.Constant", "rollout.prompts_per_step=2", "rollout.group_size=2",
        "rollout.max_tokens=4", "train.steps=13", "save.every=5", "save.keep=10",
    )  # fmt: skip
    run, notes = trained(tmp_path / "run", *settings)
    told = [note for note in notes if note.startswith("health: learned since step 1")]
    assert len(told) == 1
    assert "over 3 steps 100% of groups had equal rewards and no gradient" in told[0]
    again = Notes()
    train(parts_with(*settings), run, [again], StopSignal(), start_of(run, 5))
    assert "superseded/1" in again.notes[0]
    assert [note for note in again.notes if "learned" in note] == []  # step 3 told it
    assert [metrics["step"] for metrics in run.steps()] == list(range(1, 14))


def test_rewards_that_differ_are_not_warned_about(judged: ModuleType, tmp_path: Path) -> None:
    settings = (
        "rollout.prompts_per_step=2",
        "rollout.group_size=2",
        "rollout.max_tokens=4",
        "train.steps=10",
    )
    run, notes = trained(tmp_path / "run", "reward.name=judged.Quick", *settings)
    assert len(run.steps()) == 10
    assert [note.partition(" since")[0] for note in notes] == ["health: cut_off"]  # of 4 tokens
