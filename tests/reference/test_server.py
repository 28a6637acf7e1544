"""The reference server and its client, over real connections to a real process."""

from __future__ import annotations

import http.client
import json
import queue
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.cli.reference import _bound, _serve
from covey.errors import ConfigError, ModelError
from covey.models.language_model import LanguageModel
from covey.models.logp import LogProbs, batch_logp
from covey.parallel.passes import micro_batches
from covey.reference.client import Address, ServerReference
from covey.reference.fingerprint import fingerprint, tokenizer_digest
from covey.reference.server import Batcher, ServerSettings, make_app
from covey.reference.wire import LogpRequest, encode_reply, encode_request
from tests.conftest import build, make_batch
from tests.reference.servers import HEALTH, TOKEN, Server, connect, forked, wait_for_text


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes

    @property
    def error(self) -> str:
        return json.loads(self.body)["error"]


def ask(
    server: Server, path: str, body: Any = None, token: str | None = TOKEN, **headers: str
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    connection.request("GET" if body is None else "POST", path, body, headers)
    response = connection.getresponse()
    answer = Answer(response.status, response.headers, response.read())
    connection.close()
    return answer


def metrics(server: Server) -> dict[str, float]:
    text = ask(server, "/metrics").body.decode()
    return {
        k: float(v) for k, v in re.findall(r"^covey_reference_(\S+) (\S+)$", text, re.MULTILINE)
    }


def client(server: Server, model: LanguageModel, **options: Any) -> ServerReference:
    address = Address(url=server.url, token=options.pop("token", TOKEN), patience=0)
    given = {"temperature": 0.7, "tokenizer": tokenizer_digest(model), **options}
    return ServerReference(address=address, **given)


def body_of(model: LanguageModel) -> bytes:
    return encode_request(make_batch(), temperature=1.0, tokenizer=tokenizer_digest(model))


def test_health_says_which_model_it_is_and_what_it_takes(
    server: Server, embedded: LanguageModel
) -> None:
    health = json.loads(ask(server, "/health").body)
    mine = fingerprint(embedded)
    assert health["model"] == "embedded"
    assert health["fingerprint"] == {
        "tokenizer": mine.tokenizer,
        "model": mine.model,
        "weights": mine.weights,
    }
    assert (health["max_tokens"], health["max_bytes"]) == (600, int(0.1 * 2**20))
    assert health["seconds"] > 0


def test_the_fingerprint_tells_models_tokenizers_and_weights_apart(embedded: LanguageModel) -> None:
    mine, qwen = fingerprint(embedded), fingerprint(build("qwen2"))
    assert qwen.tokenizer == mine.tokenizer
    assert qwen.model != mine.model
    assert qwen.weights == fingerprint(build("qwen2")).weights
    changed = build("qwen2")
    with torch.no_grad():
        next(changed.model.parameters())[0, 0] += 1e-3
    assert fingerprint(changed).weights != qwen.weights
    assert fingerprint(changed).model == qwen.model
    assert fingerprint(build("qwen2", torch.bfloat16)).weights != qwen.weights
    changed.tokenizer.add_tokens(["<new>"])
    assert fingerprint(changed).tokenizer != qwen.tokenizer


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", "ü"])
@pytest.mark.parametrize("path", ["/logp", "/health", "/metrics", "/nothing"])
def test_without_the_token_nothing_is_told(server: Server, path: str, token: str | None) -> None:
    answer = ask(server, path, b"x" if path == "/logp" else None, token=token)
    assert answer.status == 401
    assert answer.error == "the bearer token is missing or wrong"


def test_a_body_above_the_limit_is_refused_whether_its_length_is_told_or_not(
    server: Server,
) -> None:
    large = b"x" * 150_000
    told = ask(server, "/logp", large)
    pieces = (large[at : at + 10_000] for at in range(0, len(large), 10_000))
    untold = ask(server, "/logp", pieces)
    assert told.status == untold.status == 413
    assert told.error == untold.error == "the body is larger than 104857 bytes (--max-megabytes)"


@pytest.mark.parametrize("token", [TOKEN, "wrong"])
def test_a_body_without_end_is_cut_off(server: Server, token: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        head = f"POST /logp HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        connection.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        with pytest.raises(OSError):  # noqa: PT012 - whichever of the writes it is
            for _ in range(1000):
                connection.sendall(chunk)
    assert ask(server, "/health").status == 200


def test_a_malformed_request_is_refused_with_the_reason(
    server: Server, embedded: LanguageModel
) -> None:
    assert ask(server, "/logp", b"garbage").status == 422
    wrong = make_batch(vocabulary=4000)
    body = encode_request(wrong, temperature=1.0, tokenizer=tokenizer_digest(embedded))
    answer = ask(server, "/logp", body)
    assert answer.status == 422
    assert "the vocabulary" in answer.error
    other = encode_request(make_batch(), temperature=1.0, tokenizer="0" * 64)
    assert "tokenizer" in ask(server, "/logp", other).error


def test_errors_and_work_are_counted(server: Server, embedded: LanguageModel) -> None:
    before = metrics(server)
    ask(server, "/nothing")
    ask(server, "/logp", b"garbage")
    assert ask(server, "/logp", body_of(embedded)).status == 200
    after = metrics(server)
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained["requests_total"] == 4
    assert gained['errors_total{status="404"}'] == gained['errors_total{status="422"}'] == 1
    assert gained["batches_total"] == 1
    assert gained["tokens_total"] == int(make_batch().mask.sum())
    assert gained["seconds_total"] > 0
    assert after["queue_length"] == 0


def test_a_large_batch_is_split_to_stay_below_the_limits(
    server: Server, embedded: LanguageModel
) -> None:
    batch = make_batch(rows=90, longest=40)
    before = metrics(server)["batches_total"]
    found = client(server, embedded).logp(batch)
    assert metrics(server)["batches_total"] - before > 3
    expected = batch_logp(embedded, batch, temperature=0.7)
    assert torch.allclose(found.logp, expected.logp, atol=1e-5, rtol=0)
    assert torch.allclose(found.entropy, expected.entropy, atol=1e-5, rtol=0)


def test_eight_clients_at_once_get_each_their_own_answer(
    server: Server, embedded: LanguageModel
) -> None:
    def work(seed: int) -> float:
        batch = make_batch(rows=5, longest=8 + seed, seed=seed)
        temperature = 1.0 + seed % 2
        reference = client(server, embedded, temperature=temperature)
        with torch.no_grad():
            expected = batch_logp(embedded, batch, temperature=temperature).logp
        return max(float((reference.logp(batch).logp - expected).abs().max()) for _ in range(4))

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(8))) <= 1e-5


def request(seed: int, temperature: float = 1.0) -> LogpRequest:
    batch = make_batch(rows=3, longest=4 + seed, seed=seed)
    return LogpRequest(batch=batch, temperature=temperature, tokenizer="")


class Slow(Batcher):
    """A batcher that starts on command."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.go, self.sizes = threading.Event(), []
        super().__init__(*arguments, **options)

    def _compute(self, requests: Any) -> Any:
        self.go.wait(60)
        self.sizes.append(len(requests))
        return super()._compute(requests)


def test_requests_that_wait_are_computed_together_if_they_fit(embedded: LanguageModel) -> None:
    worker = Slow(embedded, max_tokens=150, waiting=10)
    temperatures = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    first = worker.submit(request(0))
    while worker.waiting:
        time.sleep(0.001)
    rest = [worker.submit(request(n, t)) for n, t in enumerate(temperatures)]
    dropped = worker.submit(request(1))
    assert dropped.cancel()
    worker.go.set()
    for number, (result, temperature) in enumerate(zip(rest, temperatures, strict=True)):
        with torch.no_grad():
            expected = batch_logp(embedded, request(number).batch, temperature=temperature)
        assert torch.allclose(result.result(60).logp, expected.logp, atol=1e-5, rtol=0)
    assert first.done()
    # 33, 36, 39 and 42 padded tokens fill 150; the others have another temperature.
    assert worker.sizes == [1, 4, 2]
    assert worker.batches == 3


def test_a_full_queue_is_told(embedded: LanguageModel) -> None:
    worker = Slow(embedded, max_tokens=600, waiting=1)
    worker.submit(request(0))
    while worker.waiting:
        time.sleep(0.001)
    worker.submit(request(0))
    with pytest.raises(queue.Full):
        worker.submit(request(0))
    worker.go.set()


def test_one_that_fails_does_not_take_the_others_with_it(embedded: LanguageModel) -> None:
    worker = Slow(embedded, max_tokens=600, waiting=10)
    worker.submit(request(0))
    while worker.waiting:
        time.sleep(0.001)
    bad = request(1)
    bad = replace(bad, batch=replace(bad.batch, tokens=bad.batch.tokens + 10_000))
    good, failed = worker.submit(request(2)), worker.submit(bad)
    worker.go.set()
    assert good.result(60).logp.shape == (3, 6)
    assert isinstance(failed.exception(60), IndexError)


def test_an_overloaded_server_says_when_to_come_again(
    embedded: LanguageModel, tmp_path: Path
) -> None:
    settings = ServerSettings(name="slow", timeout=2.0, waiting=1)
    output, body = tmp_path / "output", body_of(embedded)

    def hang(self: Batcher, requests: Any) -> None:
        print("begun")
        time.sleep(60)

    def serve() -> int:
        Batcher._compute = hang
        _serve(make_app(embedded, settings), _bound("127.0.0.1", 0), settings)
        return 0

    slow = Server(forked(serve, output), wait_for_text(output, "http://.*"))
    try:
        with ThreadPoolExecutor(2) as pool:
            computed = pool.submit(ask, slow, "/logp", body)
            wait_for_text(output, "begun")
            waiting = pool.submit(ask, slow, "/logp", body)
            while metrics(slow)["queue_length"] == 0:
                time.sleep(0.01)
            answers = [ask(slow, "/logp", body), computed.result(), waiting.result()]
        counted = metrics(slow)
    finally:
        slow.kill()
    assert [(a.status, a.headers["Retry-After"]) for a in answers] == [(503, "1")] * 3
    assert [a.error for a in answers] == ["the queue is full", *["not done within 2 s"] * 2]
    assert counted['errors_total{status="503"}'] == 3


def test_a_wrong_token_ends_the_run_at_once(server: Server, embedded: LanguageModel) -> None:
    with pytest.raises(ModelError, match="replied 401: the bearer token is missing or wrong"):
        client(server, embedded, token="wrong")


def test_another_tokenizer_is_refused_at_once(server: Server) -> None:
    other = build("qwen2")
    other.tokenizer.add_tokens(["<new>"])
    with pytest.raises(
        ModelError, match=r"the model embedded on .* has another tokenizer than the policy"
    ):
        client(server, other)


def test_weights_must_be_those_of_the_configuration_and_of_the_checkpoint(
    server: Server, embedded: LanguageModel, tmp_path: Path
) -> None:
    weights = fingerprint(embedded).weights
    reference = client(server, embedded, weights=weights)
    assert reference.identity == f"server {server.url} {weights}"
    assert client(server, embedded).weights == weights
    with pytest.raises(ModelError, match=r"has other weights: expected abc"):
        client(server, embedded, weights="abc")
    reference.save(tmp_path)
    reference.load(tmp_path)
    (tmp_path / "reference.json").write_text('{"weights": "abc"}')
    with pytest.raises(ModelError, match="has other weights"):
        reference.load(tmp_path)


def test_a_server_that_is_away_is_waited_for_and_told_of_once(
    scripted: tuple[str, list[tuple[int, bytes]]],
) -> None:
    url, replies = scripted
    replies += [(503, b'{"error": "busy"}'), (0, b""), (502, b"<html>"), (200, b"")]
    replies[-1] = (200, json.dumps(HEALTH).encode())
    notes: list[str] = []
    assert connect(url, notes, patience=60).weights == "w"
    assert len(notes) == 2
    assert notes[0].startswith(f"reference: {url} replied 503: busy; waiting up to 60 s")
    assert notes[1] == f"reference: {url} is back"


def test_other_weights_in_the_middle_of_a_run_end_it(
    scripted: tuple[str, list[tuple[int, bytes]]],
) -> None:
    url, replies = scripted
    batch = make_batch()
    values = LogProbs(logp=-torch.rand(batch.mask.shape), entropy=torch.rand(batch.mask.shape))
    replies += [(200, json.dumps(HEALTH).encode())]
    replies += [(200, encode_reply(values, digest)) for digest in ("w", "other")]
    reference = connect(url, [], patience=0)
    found, order = reference.logp(batch), next(iter(micro_batches(batch, 10**6)))
    assert torch.equal(found.logp[order], values.logp)
    with pytest.raises(ModelError, match=r"expected w\.\.\., found other"):
        reference.logp(batch)


def test_patience_comes_to_an_end(scripted: tuple[str, list[tuple[int, bytes]]]) -> None:
    url, _ = scripted
    notes: list[str] = []
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"within 0\.3 s: the server cannot be reached: "):
        connect(url, notes, patience=0.3)
    assert time.monotonic() - started < 5
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, b"hello", "is not a reference server"),
        (200, b'{"model": 5}', "is not a reference server"),
        (200, json.dumps({**HEALTH, "max_tokens": "x"}).encode(), "is not a reference server"),
        (422, b'{"error": "a\\nb"}', "replied 422: a b"),
        (404, b"<html>no</html>", "replied 404: <html>no</html>"),
        (302, b"", "replied 302"),
        (500, b"", "replied 500"),
    ],
)
def test_what_would_fail_again_is_an_error_at_once(
    scripted: tuple[str, list[tuple[int, bytes]]], status: int, body: bytes, words: str
) -> None:
    url, replies = scripted
    replies.append((status, body))
    with pytest.raises(ModelError) as raised:
        connect(url, [], patience=60)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8500",
        "ftp://x",
        "http://",
        "http://x:0",
        "http://x y",
        "http://[",
        "http://x:99999",
    ],
)
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"reference\.url = .* is not a URL such as http"):
        Address(url=url)


def test_an_address_with_a_password_is_refused_and_not_shown() -> None:
    for url in ("http://me:secret@x", "http://x?token=secret", "http://x#secret"):
        with pytest.raises(ConfigError, match="must not contain a password") as raised:
            Address(url=url)
        assert "secret" not in str(raised.value)
