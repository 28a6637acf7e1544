"""Training through real Ray actors, on a CPU. Run it with `make test-heavy`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: make test-heavy")

from covey.cluster.ray_client import Actors, Need, check_room, connect
from covey.cluster.scoring import RayScorer
from covey.errors import ConfigError, EngineError
from covey.rewards.registry import make_reward
from covey.scoring import Job
from covey.types import Prompt
from tests.heavy.runs import Run, check_run

pytestmark = pytest.mark.slow
STALE = "127.0.0.1:9"
"""Nobody listens there."""


def test_training_through_actors_of_which_two_are_killed(tmp_path: Path, native: Run) -> None:
    settings = {
        "cluster__engines": 1, "cluster__max_engines": 2, "cluster__engine_cpus": 0.5,
        "cluster__scoring_actors": 1, "scoring__workers": 1,
        "reward__name": "tests.heavy.rewards:Slow",
    }  # fmt: skip
    run = Run(tmp_path / "run", "--ray", "local", "--trust", "tests", **settings)
    run.wait_for_text("engine 2 has joined; engines: 2")
    run.kill("ray::EngineActor")
    run.wait_for_text("replaces it")
    run.kill("ray::ScoringActor")
    check_run(run, native)
    assert "scoring worker 1 died and was restarted" in run.text()
    assert sum(step.get("scoring/restarts", 0) for step in run.steps()) == 1


SHORT = {
    "train__steps": 400, "rollout__prompts_per_step": 4, "rollout__group_size": 4,
    "rollout__max_tokens": 16, "evaluate__every": 0, "cluster__engine_cpus": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("word", ["raylet/raylet", "gcs/gcs_server"])
@pytest.mark.parametrize(
    "actors",
    [
        {"cluster__engines": 1},
        {"cluster__engines": 0, "cluster__scoring_actors": 1, "scoring__workers": 1,
         "reward__name": "tests.heavy.rewards:Slow"},
    ],
    ids=["engine", "scoring"],
)  # fmt: skip
def test_a_run_whose_ray_is_killed_says_so_and_saves(
    word: str, actors: dict[str, object], tmp_path: Path
) -> None:
    if word.startswith("raylet") and actors["cluster__engines"]:
        pytest.xfail("Ray's library ends the process within a second, before Covey can look")
    run = Run(tmp_path / "run", "--ray", "local", "--trust", "tests", **SHORT, **actors)
    run.wait_for_step(3)
    run.kill(word)
    assert run.end() == 1, run.text()
    assert "the Ray cluster is gone" in run.text()
    saved = [path.name for path in (run.folder / "checkpoints").iterdir()]
    assert saved == [f"{len(run.steps()):06d}"], run.text()
    assert f"saved step {len(run.steps())}; resume with" in run.text()
    for number in [
        pid for word in ("gcs_server", "raylet", "ray::") for pid in run.processes(word)
    ]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def test_the_file_of_a_cluster_that_has_ended_is_ignored(tmp_path: Path) -> None:
    """Ray writes the address of a cluster into a file, which stays if the cluster is killed."""
    script = f"""
import ray._private.utils as utils
utils.read_ray_address = lambda *_: {STALE!r}
from covey.cluster.ray_client import connect
connect("local")
import ray
print(ray.cluster_resources()["CPU"] > 0)
ray.shutdown()
"""
    environment = {**os.environ, "RAY_ADDRESS": STALE}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    import ray

    yield
    ray.shutdown()


def test_a_scoring_worker_that_is_killed_loses_no_score() -> None:
    connect("local")
    import ray

    reward = make_reward("think_answer", {})
    settings = {"workers": 1, "timeout": 30.0, "gigabytes": 2.0}
    scorer = RayScorer(
        reward=reward, identity="x", actors=2, need=Need(cpus=0.5), settings=settings, restarts=1
    )
    prompt = Prompt(id="1", task="t", messages=({"role": "user", "content": "1+1?"},), target="2")
    text = "<think>1+1=2</think><answer>2</answer>"
    jobs = [Job(prompt=prompt, texts=(text,), progress=0.0) for _ in range(12)]
    first = scorer.submit(jobs[0]).result()
    os.kill(ray.get(scorer.handles[1].pid.remote()), signal.SIGKILL)
    pending = [scorer.submit(job) for job in jobs]
    assert [one.result() for one in pending] == [first] * len(jobs)
    assert scorer.events() == ["scoring worker 2 died and was restarted"]
    scorer.close()


def test_more_than_the_cluster_has_is_one_line() -> None:
    connect("local")
    with pytest.raises(
        ConfigError, match=r"needs 3000 CPUs for 1000 engines, but the Ray cluster has only"
    ):
        check_room([Actors(name="engines", count=1000, need=Need(cpus=3))])


def test_a_wrong_address_is_one_line() -> None:
    import ray

    ray.shutdown()
    with pytest.raises(
        ConfigError,
        match=r"cluster.address = '127.0.0.1:9', but this Ray cluster cannot be reached",
    ):
        connect("127.0.0.1:9")


def test_a_ray_that_starts_too_slowly_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    ray.shutdown()
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(
        ConfigError, match=r"'local', but Ray cannot start on this machine: .* timed out"
    ):
        connect("local")


def failing() -> object:
    raise RuntimeError("no such device")


def test_a_failure_in_an_actor_is_one_line_with_its_traceback() -> None:
    from covey.cluster.ray_engine import RayEngine

    connect("local")
    engine = RayEngine(
        build=failing, engines=1, most=1, need=Need(cpus=0.5), threads=1, restarts=1, patience=300
    )
    with pytest.raises(EngineError, match=r"engine 1 failed: .*no such device") as caught:
        _ = engine.info
    assert "in failing" in caught.value.details
