"""The scoring pool: no reward can harm the run, or the score of another completion."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.config.schema import Scoring
from covey.errors import ConfigError, RewardError
from covey.rewards import ThinkAnswer, as_reward
from covey.rewards.code import CodeTests
from covey.rewards.registry import REWARDS
from covey.scoring import InlineScorer, Job, Pool, ScoreResult, make_scorer
from covey.types import Prompt
from tests.processes import alive, wait_until
from tests.scoring import rewards as functions

PROMPT = Prompt(
    id="p/1",
    task="t",
    messages=({"role": "user", "content": "1+1?"},),
    target="2",
    info={"level": 3},
)
LIMIT = 1.0


def job(*texts: str, share: float = 1.0) -> Job:
    return Job(prompt=PROMPT, texts=texts, progress=share)


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(functions.Obeys(), "obeys", workers=2, timeout=LIMIT)
    yield pool
    pool.close()


def reward_values(results: list[ScoreResult]) -> list[float | None]:
    return [None if v.score is None else v.score.reward for v in results]


def test_results_come_back_in_order_whichever_finishes_first(pool: Pool) -> None:
    times = [0.4, 0.0, 0.2, 0.1, 0.3, 0.0]
    futures = [pool.submit(job(f"sleep {t}")) for t in times]
    assert [reward_values(f.result())[0] for f in futures] == times


def test_processes_share_the_work_and_do_not_wait_for_a_slow_job(
    tmp_path: Path,
) -> None:
    pool = Pool(functions.Obeys(), "obeys", workers=2, timeout=60)
    long = pool.submit(job(f"wait {tmp_path / 'done'}"))
    quick = [pool.submit(job("1")) for _ in range(20)]
    pids = {f.result()[0].score.parts["pid"] for f in quick}
    assert len(pids) == 1
    assert not long.done()
    (tmp_path / "done").touch()
    assert reward_values(long.result()) == [1.0]
    pool.close()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("raise apples", "KeyError: 'apples'"),
        ("loop", "took longer than 1 seconds"),
        ("sleep 60", "took longer than 1 seconds"),
        ("exit", "the scoring process ended with code 3"),
        ("quit", "the scoring process ended with code 4"),
        ("crash", "the scoring process ended by signal SIGSEGV"),
        ("type", "TypeError: a reward returns a Score, not float"),
        ("nan", "ValueError: the reward is nan"),
        ("-inf", "ValueError: the reward is -inf"),
        ("words", "ValueError: could not convert"),
        ("child", "took longer than 1 seconds"),
    ],
)
def test_a_failing_reward_costs_one_completion_its_reward(pool: Pool, bad: str, why: str) -> None:
    texts = ["1", "2", bad, "3", "4", "5"]
    results = [pool.submit(job(text)) for text in texts]
    results = [v.result()[0] for v in results]
    assert reward_values(results) == [1.0, 2.0, None, 3.0, 4.0, 5.0]
    assert results[2].error.startswith(why)
    assert reward_values(pool.submit(job("6")).result()) == [6.0]


def test_a_time_limit_kills_what_the_reward_had_started_as_well(pool: Pool) -> None:
    (result,) = pool.submit(job("child raise")).result()
    pid = int(result.error.split(" (")[0].split()[-1])
    assert alive(pid)
    # Both processes are busy, so each reaches its time limit; one of them has the child.
    for future in [pool.submit(job("loop")) for _ in range(4)]:
        assert reward_values(future.result()) == [None]
    wait_until(lambda: not alive(pid))


def test_what_a_reward_prints_stays_out_of_the_conversation(pool: Pool) -> None:
    futures = [pool.submit(job("print hello")) for _ in range(5)]
    assert [reward_values(f.result()) for f in futures] == [[0.5]] * 5


def test_large_scores_and_many_completions_arrive(pool: Pool) -> None:
    assert reward_values(pool.submit(job("big")).result()) == [1.0]
    futures = [pool.submit(job(str(n), str(-n))) for n in range(2000)]
    assert [reward_values(f.result()) for f in futures] == [[n, -n] for n in range(2000)]


def test_an_async_function_scores_many_completions_concurrently() -> None:
    pool = Pool(as_reward(functions.waits), "waits", workers=1, timeout=2.0)
    pool.start()
    started = time.monotonic()
    futures = [pool.submit(job("0.4")) for _ in range(32)]
    assert [reward_values(f.result()) for f in futures] == [[0.4]] * 32
    assert time.monotonic() - started < 32 * 0.4 / 2
    # The one that never comes back is the only one without a reward.
    futures = [pool.submit(job(t)) for t in ("0", "600", "0.1", "words")]
    assert [reward_values(f.result())[0] for f in futures] == [0.0, None, 0.1, None]
    assert reward_values(pool.submit(job("0")).result()) == [0.0]
    pool.close()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("exit", "the scoring process ended with code 3"),
        ("sleep 60", "took longer than 1 seconds"),
        ("thread", "took longer than 1 seconds"),
        ("raise apples", "KeyError: 'apples'"),
    ],
)
def test_one_that_blocks_or_dies_costs_those_that_wait_beside_it_nothing(
    bad: str, why: str
) -> None:
    pool = Pool(as_reward(functions.obeys_async), "obeys", workers=2, timeout=LIMIT)
    pool.start()
    futures = [pool.submit(job(bad if n == 5 else str(n))) for n in range(24)]
    results = [f.result()[0] for f in futures]
    assert reward_values(results) == [None if n == 5 else n for n in range(24)]
    assert results[5].error.startswith(why)
    assert [reward_values(pool.submit(job("6")).result()) for _ in range(3)] == [[6.0]] * 3
    pool.close()


def test_a_function_of_whole_groups_gets_whole_groups() -> None:
    pool = make_scorer("relative", as_reward(functions.relative), workers=1, timeout=5)
    assert pool.whole_groups
    assert reward_values(pool.submit(job("a", "aaaa", "aa")).result()) == [0.25, 1.0, 0.5]
    pool.close()


def test_closing_ends_every_process_and_cancels_what_waits() -> None:
    pool = Pool(functions.Obeys(), "obeys", workers=2, timeout=60)
    pids = {pool.submit(job("1")).result()[0].score.parts["pid"] for _ in range(20)}
    busy = [pool.submit(job("loop")) for _ in range(2)]
    waiting = [pool.submit(job("loop")) for _ in range(5)]
    time.sleep(0.2)
    pool.close()
    assert all(f.cancelled() or f.done() for f in waiting)
    assert all(f.done() for f in busy)
    assert not any(alive(int(pid)) for pid in pids)
    with pytest.raises(RewardError, match="closed"):
        pool.submit(job("1"))


def test_processes_die_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import time\nfrom tests.scoring.test_pool import *\n"
        "pool = Pool(functions.Obeys(), 'obeys', workers=1, timeout=60)\n"
        "print(int(pool.submit(job('1')).result()[0].score.parts['pid']), flush=True)\n"
        "pool.submit(job('loop'))\ntime.sleep(60)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    time.sleep(0.3)
    assert alive(pid)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    wait_until(lambda: not alive(pid))


def test_quick_rewards_stay_here_and_others_get_processes() -> None:
    assert isinstance(
        make_scorer("think_answer", ThinkAnswer(), workers=1, timeout=1), InlineScorer
    )
    pool = make_scorer("obeys", functions.Obeys(), workers=1, timeout=1)
    assert isinstance(pool, Pool)
    assert pool.identity.startswith("obeys@1#")
    pool.close()


def test_a_time_limit_that_is_shorter_than_the_reward_s_own_is_refused() -> None:
    reward = CodeTests(unsafe=True, seconds=2.0, total_seconds=6.0)
    why = r"scoring\.timeout = 6 is less than the 7 seconds that the reward code_tests .* total_seconds"
    with pytest.raises(ConfigError, match=why):
        make_scorer("code_tests", reward, workers=1, timeout=6.0)
    make_scorer("code_tests", reward, workers=1, timeout=7.0).close()


@pytest.mark.parametrize("name", ["code_tests", "code", "retrieval"])
def test_the_limits_that_come_with_a_reward_fit_the_usual_one(name: str) -> None:
    judge = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": ""}
    options = {"judge": judge} if name == "retrieval" else {"unsafe": True}
    longest = REWARDS[name](**options).max_seconds
    assert 20.0 < longest < Scoring().timeout


def test_a_reward_that_cannot_be_sent_is_refused_with_a_remedy() -> None:
    def mine(prompt: Prompt, text: str) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=r"in a module, or .*`quick = True`"):
        make_scorer("mine", as_reward(mine), workers=1, timeout=1)
    mine.quick = True
    assert reward_values(make_scorer("mine", as_reward(mine)).submit(job("x")).result()) == [1.0]


def test_a_reward_that_the_process_cannot_load_is_an_error_at_once(tmp_path: Path) -> None:
    # The module is there when the reward is pickled and gone when the process looks for it.
    (tmp_path / "vanishing_module.py").write_text("def f(prompt, text): return 1.0\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import vanishing_module

        (tmp_path / "vanishing_module.py").unlink()
        with pytest.raises(RewardError, match="cannot load the reward: ModuleNotFoundError"):
            make_scorer("gone", as_reward(vanishing_module.f), workers=1, timeout=1)
    finally:
        sys.path.remove(str(tmp_path))


def test_a_completion_keeps_its_reward_when_others_kill_its_process(tmp_path: Path) -> None:
    pool = Pool(functions.Obeys(), "obeys", workers=1, timeout=60)
    running = pool.submit(job("1"))
    pid = int(running.result()[0].score.parts["pid"])
    slow, waiting = pool.submit(job(f"wait {tmp_path / 'done'}")), pool.submit(job("0.25"))
    time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    (tmp_path / "done").touch()
    assert [reward_values(f.result()) for f in (slow, waiting)] == [[1.0], [0.25]]
    assert pool.events() == ["a scoring process ended by signal SIGKILL, and was replaced"]
    assert pool.events() == []
    pool.close()
