"""Servers that fail: which server is repaired, how often, and what an NCCL broadcast waits for.

The servers here only follow vLLM's protocol, and requests that wait for each other replace NCCL.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from covey.engines.protocol import Sampling
from covey.engines.vllm.client import Client
from covey.engines.vllm.engine import (
    NEW_TOKENS,
    Replica,
    VllmEngine,
    probe_prompt,
    skeleton_of,
    trainer_logp,
)
from covey.engines.vllm.sync import FileSync, Fleet, NcclSync
from covey.errors import EngineError
from covey.models.language_model import LanguageModel
from covey.rollout.episode import encode_prompts, generate
from covey.tasks.arithmetic import Arithmetic
from tests.engines.vllm.test_client import serving

TOKENS = (5,) * (NEW_TOKENS - 1) + (1,)
WAIT_SECONDS = 60.0


@dataclass
class Server:
    """A server whose weights have a version; a dead one is started when its models are listed."""

    logp: Sequence[float]
    """The log-probs of every completion, which are right for the probe only."""
    newest: Any = None
    """Returns the version that the engine sends."""
    barrier: threading.Barrier | None = None
    """What trainer and servers wait at, as they wait for each other in NCCL."""
    url: str = ""
    version: int = -1
    dead: bool = False
    fails_at: str = ""
    received: list[int] = field(default_factory=list)

    def reply(self, path: str) -> tuple[int, bytes]:
        if path == "/v1/models":
            self.dead = False
            return 200, b'{"data": []}'
        if self.dead or path == self.fails_at:
            return 503, b"out of memory"
        if path == "/update_weights":
            if self.barrier is not None:
                self.barrier.wait(WAIT_SECONDS)
            self.received.append(self.newest())
        if path in ("/finish_weight_update", "/update_weight_version") and self.received:
            self.version = self.received[-1]
        return 200, json.dumps(self.choices() | {"world_size": 1, "success": True}).encode()

    def choices(self) -> dict[str, Any]:
        logp = [{"logprob": value} for value in self.logp]
        versions = [{"version": str(self.version), "start": 0, "end": len(TOKENS)}]
        choice = {"token_ids": TOKENS, "logprobs": {"content": logp}, "finish_reason": "stop"}
        return {"choices": [choice | {"weight_versions": versions}]}


class Broadcast:
    """What vLLM's trainer-side engine does: requests to all servers beside a broadcast."""

    def __init__(self, clients: Sequence[Client], sync: NcclSync, servers: list[Server]) -> None:
        self.fleet = Fleet(clients, lambda error: sync.outcomes.put(error))
        self.barrier = threading.Barrier(len(servers) + 1)
        for server in servers:
            server.barrier = self.barrier

    def send_weights(self) -> None:
        self.fleet.start_weight_update()
        updates = threading.Thread(target=self.update)
        updates.start()
        self.barrier.wait(WAIT_SECONDS)
        updates.join()
        self.fleet.finish_weight_update()

    def update(self) -> None:
        with suppress(Exception):  # vLLM's engine looks at it only after its broadcast
            self.fleet.update_weights({})


def made(model: LanguageModel, sync: Any, servers: list[Server], restarts: int = 1) -> VllmEngine:
    clients = [Client(server.url, WAIT_SECONDS) for server in servers]
    engine = VllmEngine(
        model=model, replicas=[Replica(client) for client in clients], sync=sync(clients),
        release=lambda: None, vllm_version="", restarts=restarts, patience=5.0,
    )  # fmt: skip
    for server in servers:
        server.newest = lambda: engine.version
    return engine


@pytest.fixture
def servers(embedded: LanguageModel) -> Iterator[list[Server]]:
    weights = dict(embedded.model.named_parameters())
    prompt = probe_prompt(embedded)
    logp = trainer_logp(skeleton_of(embedded.model), weights, prompt, TOKENS).tolist()
    with ExitStack() as stack:
        found = [Server(logp) for _ in range(3)]
        for server in found:
            server.url = stack.enter_context(serving(server.reply))
        yield found
        for server in found:
            if server.barrier is not None:
                server.barrier.abort()


@pytest.fixture
def nccl(
    embedded: LanguageModel, servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> Iterator[VllmEngine]:
    monkeypatch.setattr(
        "covey.engines.vllm.sync.nccl_engine",
        lambda clients, host, sync: Broadcast(clients, sync, servers),
    )
    monkeypatch.setattr("covey.engines.vllm.sync.FAILED_SECONDS", 0.2)
    engine = made(embedded, lambda clients: NcclSync(embedded, clients, "127.0.0.1"), servers)
    yield engine
    engine.close()


def load(engine: VllmEngine, version: int) -> None:
    engine.load_weights(engine.model.model.named_parameters, version)


def test_restarts_are_counted_from_the_last_completion(
    embedded: LanguageModel, servers: list[Server], tmp_path: Path
) -> None:
    server = servers[0]
    engine = made(embedded, lambda clients: FileSync(embedded, tmp_path), [server])
    load(engine, 0)
    prompts = encode_prompts(embedded, Arithmetic().train()[:2])
    sampling = Sampling(group_size=1, max_tokens=len(TOKENS))
    for _ in range(3):
        server.dead = True
        generate(prompts, engine=engine, model=embedded, sampling=sampling, step=1)
        (event,) = engine.events()
        assert "failed with 503" in event
    server.fails_at = "/inference/v1/generate"
    server.dead = True
    with pytest.raises(EngineError, match="after a restart it failed with 503"):
        generate(prompts[:1], engine=engine, model=embedded, sampling=sampling, step=1)
    engine.close()


def test_no_server_generates_before_all_have_the_weights(
    nccl: VllmEngine, servers: list[Server]
) -> None:
    for version in (0, 1, 2):
        load(nccl, version)
    assert [server.received for server in servers] == [[0, 1, 2]] * 3


def test_a_server_that_is_dead_before_a_broadcast_is_repaired(
    nccl: VllmEngine, servers: list[Server]
) -> None:
    load(nccl, 0)
    for version, server in ((1, servers[1]), (2, servers[0]), (3, servers[2])):
        server.dead = True
        load(nccl, version)
        (event,) = nccl.events()
        assert event.startswith(f"the vLLM server {server.url} ")
        assert [each.version for each in servers] == [version] * 3


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_server_that_fails_during_a_broadcast_is_named(
    nccl: VllmEngine, servers: list[Server], number: int
) -> None:
    load(nccl, 0)
    servers[number].fails_at = "/update_weights"
    started = time.monotonic()
    with pytest.raises(EngineError, match=rf"{servers[number].url} cannot .*while NCCL sent"):
        load(nccl, 1)
    assert time.monotonic() - started < WAIT_SECONDS / 2
