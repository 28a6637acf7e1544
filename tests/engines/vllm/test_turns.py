"""Turns of an environment through vLLM: tools are asked while completions are pending."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from covey.engines.protocol import Completion, Limits, Request, Sampling
from covey.engines.vllm.client import Client
from covey.engines.vllm.engine import Replica, VllmEngine
from covey.engines.vllm.sync import FileSync
from covey.models.load_model import load_language_model
from covey.rng import Address
from tests.engines.vllm.test_client import CHOICE, serving

TOOL_SECONDS = 0.1
SERVER_SECONDS = 5.0
PREEMPTIONS = """\
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="m"}} 7.0
vllm:num_preemptions_total{{engine="1",model_name="m"}} {}.0
vllm:prompt_tokens_total{{engine="0",model_name="m"}} 900.0
"""


def request(number: int) -> Request:
    return Request(
        number=number, prompt=number, tokens=(number + 5,), address=Address(0, 1, str(number), 0)
    )


@dataclass
class Turns:
    """Two requests; a tool works on the first completion, and then there is a third request."""

    ready: list[Request] = field(default_factory=lambda: [request(0), request(1)])
    tool_ends: float = float("inf")
    order: list[int] = field(default_factory=list)

    @property
    def limits(self) -> Limits:
        sampling = Sampling(max_tokens=8)
        return Limits(sampling=sampling, requests=3, prompts=3, prompt_tokens=1, steady=True)

    def take(self) -> Sequence[Request]:
        if time.monotonic() > self.tool_ends:
            self.ready, self.tool_ends = [request(2)], float("inf")
        ready, self.ready = self.ready, []
        return ready

    def done(self, completions: Sequence[Completion]) -> None:
        self.order += [completion.request.number for completion in completions]
        if len(self.order) == 1:  # whichever request the server received first
            self.tool_ends = time.monotonic() + TOOL_SECONDS


def test_a_turn_that_becomes_ready_does_not_wait_for_pending_completions(tmp_path: Path) -> None:
    calls: list[float] = []
    third = threading.Event()

    def reply(path: str) -> tuple[int, bytes]:
        if path == "/metrics":  # a preemption for each completion so far
            return 200, PREEMPTIONS.format(len(calls)).encode()
        calls.append(time.monotonic())
        if len(calls) == 3:
            third.set()
        elif len(calls) == 2:  # a long completion, which ends after the third request
            assert third.wait(SERVER_SECONDS), "the turn after the tool was not sent"
        choice = {**CHOICE, "weight_versions": [{"version": "-1", "start": 0, "end": 2}]}
        return 200, json.dumps({"choices": [choice]}).encode()

    model = load_language_model("embedded", device="cpu")
    with serving(reply) as url:
        engine = VllmEngine(
            model=model, replicas=[Replica(Client(url, 2 * SERVER_SECONDS))],
            sync=FileSync(model, tmp_path), release=lambda: None, vllm_version="",
            restarts=0, patience=1.0,
        )  # fmt: skip
        turns = Turns()
        engine.run(turns)
        engine.close()
    assert sorted(turns.order) == [0, 1, 2]
    assert third.is_set()
    assert engine.preemptions == 3
    assert calls[2] - calls[0] < SERVER_SECONDS / 2
