"""An environment package of verifiers, with the real package, runs unchanged."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from covey.environments.host import Host, make_host
from covey.environments.registry import make_factory
from covey.errors import ConfigError
from covey.tasks.registry import make_task
from covey.trust import scoped_trust, trust
from covey.types import Prompt

pytest.importorskip("verifiers.envs.multiturn_env", reason="needs verifiers 0.1")
OPTIONS = {"package": "adding_env", "arguments": {"size": 3}}


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with scoped_trust():
        trust(["adding_env"])
        yield
    sys.modules.pop("adding_env", None)


def first_prompt() -> Prompt:
    return make_task("verifiers", OPTIONS).train()[0]


def one(host: Host) -> Any:
    ((_, reply),) = host.replies(wait=True)
    return reply


def call(**arguments: int) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
    return {"role": "assistant", "content": "<tool_call>...</tool_call>", "tool_calls": calls}


def test_the_task_is_the_packages_dataset() -> None:
    task = make_task("verifiers", OPTIONS)
    assert [prompt.text for prompt in task.train()] == ["0 + 1?", "1 + 1?", "2 + 1?"]
    assert [prompt.target for prompt in task.train()] == ["1", "2", "3"]


def test_a_package_must_be_trusted() -> None:
    with pytest.raises(ConfigError, match="not trusted"):
        make_task("verifiers", {"package": "other_env"}).train()


def test_an_episode_in_a_process_of_its_own() -> None:
    factory = make_factory("verifiers", OPTIONS)
    with closing(make_host("verifiers", factory, workers=1, timeout=60)) as host:
        host.start(0, first_prompt(), 0)
        start = one(host)
        assert start.error == ""
        assert start.messages[-1] == {"role": "user", "content": "0 + 1?"}
        assert start.tools[0]["function"]["name"] == "add"
        assert set(start.tools[0]["function"]["parameters"]["properties"]) == {"a", "b"}
        host.step(0, call(a=0, b=1))
        reply = one(host)
        assert [message["content"] for message in reply.messages] == ["1"]
        host.step(0, {"role": "assistant", "content": "1"})
        assert one(host).outcome == {"rubric": 0.5}


def test_a_limit_of_coveys_still_scores_the_episode() -> None:
    with closing(make_host("verifiers", make_factory("verifiers", OPTIONS), workers=1)) as host:
        host.start(0, first_prompt(), 0)
        one(host)
        host.step(0, call(a=5, b=1))
        one(host)
        host.end(0)
        last = one(host)
        assert last.error == ""
        assert last.outcome == {"rubric": 0.0}
