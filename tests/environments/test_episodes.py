"""Episodes with environments that take their time, fail, hang, die or talk nonsense."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch

from covey.collate import collate
from covey.environments.adapters import as_environment
from covey.environments.environment import Start
from covey.environments.host import ProcessHost, Reply, make_host
from covey.models.chat import Template
from covey.models.language_model import LanguageModel
from covey.models.load_model import wrap
from covey.recipes.agent_calculator.environment import Calculator
from covey.types import Group, Rollout
from tests.environments import worlds
from tests.environments.chat_templates import FAMILIES
from tests.environments.exactness import policy
from tests.environments.playing import play, prompts, rollouts_of
from tests.processes import wait_until


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return policy(FAMILIES["smollm2"])


@pytest.fixture(scope="module")
def fine(model: LanguageModel) -> list[Group]:
    """Groups of an environment that makes no trouble."""
    return play(model, worlds.Quick)


def test_the_time_that_tools_take_changes_nothing(model: LanguageModel) -> None:
    slow = {"count": 8, "group_size": 4, "timeout": 30.0}  # a loaded machine adds to the time
    instant = play(model, worlds.Quick, **slow)
    assert {r.finish for r in rollouts_of(instant)} <= {"stop", "length"}
    assert play(model, worlds.Sleeps, **slow) == instant
    assert play(model, worlds.SleepsAsync, **slow) == instant


def test_the_time_that_tools_take_changes_no_rounding_of_long_conversations(
    model: LanguageModel,
) -> None:
    few = {"count": 3, "group_size": 3, "timeout": 30.0, "max_tokens": 3000}  # 9 slots
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        instant = play(model, worlds.Quick, **few)
        assert play(model, worlds.Sleeps, **few) == instant
        assert play(model, worlds.SleepsAsync, **few) == instant
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("kind", "finish", "error"),
    [
        (worlds.Raises, "error", "ValueError: out of order"),
        (worlds.RaisesAtReset, "error", "ValueError: no world today"),
        (worlds.Hangs, "error", "a step took longer than 1.5 seconds"),
        (worlds.HangsAsync, "error", "a step took longer than 1.5 seconds"),
        (worlds.Dies, "error", "its process ended with code 7"),
        (worlds.Nonsense, "error", "TypeError: a message has role and content"),
        (worlds.Big, "token_limit", ""),
    ],
)
def test_a_bad_episode_leaves_the_others_as_they_are(
    model: LanguageModel, fine: list[Group], kind: type, finish: str, error: str
) -> None:
    groups = play(model, kind)
    for number, (group, expected) in enumerate(zip(groups, fine, strict=True)):
        if number != 3:
            assert group == expected
    bad = groups[3].rollouts
    reached = [r for r in bad if r.finish != "length"]  # a turn that is cut off meets no tool
    assert reached
    for rollout in reached:
        assert rollout.finish == finish
        assert rollout.episode is not None
        assert rollout.episode.error.startswith(error)
        assert rollout.reward is None
    batch = collate([replace(g, rollouts=g.rollouts) for g in groups])
    assert math.isnan(float(batch.rewards[6]))
    assert int(batch.mask.sum()) == sum(r.sampled for r in rollouts_of(groups))


def test_a_process_that_dies_while_it_is_idle_is_replaced() -> None:
    prompt = prompts(1)[0]
    turn = {"role": "assistant", "content": "go"}
    host = make_host("test", worlds.Counting, workers=1, timeout=30)
    assert isinstance(host, ProcessHost)

    def die() -> None:
        worker = host.pool.lanes[0].worker
        assert worker is not None
        worker.process.kill()
        worker.process.wait()

    def reply() -> Reply:
        [(key, found)] = host.replies(wait=True)
        assert key == 7
        return found

    with closing(host):
        host.start(7, prompt, 0)
        assert not reply().error
        die()
        host.step(7, turn)  # the command could not arrive, so it is sent to a new process
        assert [m["content"] for m in reply().messages] == ["0 1"]
        die()
        host.clear()
        host.start(7, prompt, 0)
        assert not reply().error


def test_a_step_whose_process_is_killed_runs_once_more_in_a_replayed_episode() -> None:
    host = make_host("test", worlds.Waits, workers=1, timeout=30)
    assert isinstance(host, ProcessHost)
    with closing(host):
        host.start(3, prompts(1)[0], 0)
        host.replies(wait=True)
        host.step(3, {"role": "assistant", "content": "go"})
        lane = host.pool.lanes[0]
        wait_until(lambda: lane.running)
        assert lane.worker is not None
        lane.worker.process.kill()
        [(key, reply)] = host.replies(wait=True)
        assert (key, reply.error) == (3, "")
        assert [m["content"] for m in reply.messages] == ["0 1"]


def test_control_tokens_from_a_tool_are_read_as_text(model: LanguageModel) -> None:
    (rollout,) = [r for r in play(model, worlds.Control)[3].rollouts if len(r.turns) > 4][:1]
    start = model.tokenizer.convert_tokens_to_ids("<|im_start|>")
    turn = rollout.turns[3]
    segment = rollout.segments[turn.segment]
    assert turn.role == "tool"
    assert segment.tokens[turn.start : turn.stop].count(start) == 2  # the tool's, the assistant's
    assert not any(segment.trained[turn.start : turn.stop])


def test_turns_in_a_prompt_are_no_turns_of_the_policy(model: LanguageModel) -> None:
    for rollout in rollouts_of(play(model, partial(Calculator, examples=2))):
        assert rollout.episode is not None
        own = [turn.text for turn in rollout.turns if turn.role == "assistant"]
        reply = rollout.episode.reply
        assert [m["content"] for m in reply if m["role"] == "assistant"] == own
        assert reply == rollout.episode.messages[-len(reply) :]
        assert len(rollout.episode.messages) - len(reply) == 2 * 4 + 1


def test_a_prefill_is_part_of_scored_texts_only_if_it_is_wanted(model: LanguageModel) -> None:
    def played(*, in_text: bool) -> list[Rollout]:
        template = Template(prefill="Hm: ", prefill_in_text=in_text)
        made = wrap(model.model, model.tokenizer, name="tiny", template=template)
        return rollouts_of(play(made, worlds.Quick))

    def texts(rollout: Rollout) -> list[str]:
        assert rollout.episode is not None
        turns = [turn.text for turn in rollout.turns if turn.role == "assistant"]
        said = [m["content"] for m in rollout.episode.messages if m["role"] == "assistant"]
        assert said == turns
        assert rollout.text == turns[-1]
        return turns

    several = 0
    for one, two in zip(played(in_text=True), played(in_text=False), strict=True):
        assert one.segments == two.segments  # the chat template shows the prefill in both
        assert texts(one) == [f"Hm: {text}" for text in texts(two)]
        several += len(texts(one)) > 1
    assert several


@pytest.mark.parametrize(
    ("limits", "finish", "turns"),
    [({"max_turns": 2}, "turn_limit", 2), ({"max_tokens": 180}, "token_limit", None)],
)
def test_every_limit_has_its_own_finish(
    model: LanguageModel, limits: dict[str, int], finish: str, turns: int | None
) -> None:
    rollouts = rollouts_of(play(model, worlds.Quick, turn_tokens=30, **limits))
    found = Counter(r.finish for r in rollouts)
    assert found[finish] > 0
    assert set(found) <= {finish, "length", "stop"}
    for rollout in rollouts:
        assert rollout.episode is not None
        assert rollout.episode.outcome is not None  # the environment was asked all the same
        if rollout.finish == finish and turns is not None:
            assert sum(turn.role == "assistant" for turn in rollout.turns) == turns


def test_turn_rewards_and_states_reach_the_batch(model: LanguageModel) -> None:
    groups = play(model, worlds.Paid, count=2)
    batch = collate(groups)
    assert batch.turn is not None
    assert batch.turn_reward is not None
    assert batch.state is not None
    rows = {}
    for rollout in rollouts_of(groups):
        for place in range(len(rollout.segments)):
            rows[rollout.prompt_id, rollout.sample, place] = len(rows)
    assert len(batch) == len(rows)
    for rollout in rollouts_of(groups):
        mine = [turn for turn in rollout.turns if turn.role == "assistant"]
        for number, turn in enumerate(mine):
            row = rows[rollout.prompt_id, rollout.sample, turn.segment]
            cells = slice(turn.start, turn.stop)
            assert set(batch.turn[row, cells].tolist()) == {number}
            assert set(batch.turn_reward[row, cells].tolist()) == {turn.reward or 0.0}
            assert len(set(batch.state[row, cells].tolist())) == 1
    first = batch.state[batch.mask & (batch.turn == 1)]
    assert len(first.unique()) == 1  # the same state in all rollouts, whatever the prompt
    assert batch.rollout is not None
    assert batch.rollout.unique().tolist() == [0, 1, 2, 3]


def test_a_class_in_trls_style_is_an_environment() -> None:
    from covey.environments.host import Driver
    from covey.types import Prompt

    driver = Driver(as_environment(worlds.Shop))
    user = {"role": "user", "content": "Shop."}
    prompt = Prompt(id="p", task="t", target="", messages=(user,), info={"budget": 5})
    start = driver.start(prompt, 0)
    assert start.messages == ({"role": "user", "content": "Shop. You have 5 coins."},)
    assert [tool["function"]["name"] for tool in start.tools] == ["buy", "count"]
    buy = start.tools[0]["function"]
    assert buy["description"] == "Buy an item."
    assert buy["parameters"] == {
        "type": "object",
        "properties": {
            "item": {"type": "string", "description": "What to buy."},
            "price": {"type": "integer", "description": "What it costs, in coins.", "default": 1},
        },
        "required": ["item"],
    }

    def call(name: str, **arguments: object) -> dict[str, object]:
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    calls = [call("buy", item="tea", price=3), call("count"), call("buy", item="car", price=9)]
    calls += [call("buy", price=1), call("steal"), {**call(""), "error": "the call is not JSON"}]
    reply = driver.step({"role": "assistant", "content": "", "tool_calls": calls})
    assert [message["content"] for message in reply.messages] == [
        "2 coins left",
        "1",
        "error: ValueError: not enough coins",
        "error: buy: item: Field required",
        "error: there is no tool 'steal'; the tools are buy, count",
        "error: the call is not JSON",
    ]
    assert not reply.done
    last = driver.step({"role": "assistant", "content": "done"})
    assert last.done
    assert last.outcome == {"environment": 1.0}


def test_start_says_messages_and_tools() -> None:
    assert Start(messages=[]).tools == ()
