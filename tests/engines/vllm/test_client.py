"""What a vLLM server may do wrong, and the one line that says so."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from covey.config import load_config
from covey.engines.vllm.check import available_memory, check_memory, check_version, check_vllm
from covey.engines.vllm.client import Client, Unavailable
from covey.errors import ConfigError, EngineError

CHOICE = {
    "token_ids": [5, 1],
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.1}]},
    "finish_reason": "stop",
    "weight_versions": [{"version": "3", "start": 0, "end": 2}],
}
CONFIG = {
    "model_config": {"logprobs_mode": "processed_logprobs"},
    "weight_transfer_config": {"backend": "covey_file"},
}


@contextmanager
def serving(reply: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    """Serve replies by path, as another program might at the address of a server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = reply(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def generated(choice: Any, timeout: float = 5.0) -> Any:
    with serving(lambda path: (200, json.dumps({"choices": [choice]}).encode())) as url:
        return Client(url, timeout).generate((1, 2), {}, "")


def test_a_reply_is_read() -> None:
    reply = generated(CHOICE)
    assert (reply.tokens, reply.logp, reply.finish) == ((5, 1), (-0.5, -0.1), "stop")
    assert reply.versions == ((0, 2, 3),)


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": []},
        {"token_ids": [5]},
        {"token_ids": [5, -1]},
        {"token_ids": [5, "1"]},
        {"token_ids": None},
        {"logprobs": None},
        {"logprobs": {"content": [{"logprob": 0.5}, {"logprob": -0.1}]}},
        {"logprobs": {"content": [{"logprob": "NaN"}, {"logprob": -0.1}]}},
        {"finish_reason": "abort"},
        {"weight_versions": None},
        {"weight_versions": [{"version": "new", "start": 0, "end": 2}]},
    ],
)
def test_a_completion_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"^engine: the vLLM server http.* sent a completion"):
        generated({**CHOICE, **wrong})


def test_garbage_and_failures_are_one_line() -> None:
    replies = {
        "/metrics": (200, b'vllm:num_preemptions_total{engine="0"} many'),
        "/garbage": (200, b"\x00\x1b[31m not json"),
        "/missing": (404, b'{"detail": "Not Found"}'),
        "/broken": (500, b'{"error": {"message": "shape mismatch\\n  in lm_head"}}'),
    }
    with serving(lambda path: replies[path]) as url:
        client = Client(url, 5.0)
        with pytest.raises(EngineError, match=r"sent a reply that is not JSON from /garbage"):
            client.get("/garbage")
        with pytest.raises(EngineError, match=r"sent a malformed count of preemptions$"):
            client.preemptions()
        with pytest.raises(EngineError, match=r"replied 404 to /missing: Not Found"):
            client.get("/missing")
        with pytest.raises(Unavailable, match=r"500 at /broken: shape mismatch in lm_head"):
            client.get("/broken")


def test_a_silent_server_is_unavailable_after_its_timeout() -> None:
    def slow(path: str) -> tuple[int, bytes]:
        time.sleep(1.0)
        return 200, b"{}"

    with (
        serving(slow) as url,
        pytest.raises(Unavailable, match=r"did not reply to /x within 0.2 s"),
    ):
        Client(url, 0.2).get("/x")


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://a", "http://", "http://a b", "http://a:x"]
)
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"engine.vllm.urls"):
        Client.at(url, 1.0)


@pytest.mark.parametrize(("version", "good"), [("0.32.0", True), ("0.26.1", False), ("1.0", False)])
def test_versions_of_vllm(version: str, good: bool) -> None:
    if good:
        check_version(version, "vLLM")
        return
    with pytest.raises(EngineError, match=rf"has version {version}, but Covey needs vLLM >= 0.27"):
        check_version(version, "vLLM")


def checked(**replies: Any) -> None:
    pages = {"/version": {"version": "0.32.0"}, "/server_info": {"vllm_config": CONFIG}, **replies}
    with serving(lambda path: (200, json.dumps(pages[path]).encode())) as url:
        check_vllm(load_config(overrides=[f'engine.vllm.urls=["{url}"]']))


def test_a_server_is_checked_before_a_model_is_loaded() -> None:
    checked()
    with pytest.raises(EngineError, match=r"has version 0.20.0, but Covey needs"):
        checked(**{"/version": {"version": "0.20.0"}})
    with pytest.raises(EngineError, match=r"is not a vLLM server"):
        checked(**{"/version": {"name": "nginx"}})
    raw = {**CONFIG, "model_config": {"logprobs_mode": "raw_logprobs"}}
    with pytest.raises(EngineError, match=r"has logprobs_mode 'raw_logprobs' instead of"):
        checked(**{"/server_info": {"vllm_config": raw}})
    with pytest.raises(EngineError, match=r"cannot be reached.*; check engine.vllm.urls"):
        check_vllm(load_config(overrides=['engine.vllm.urls=["http://127.0.0.1:9"]']))


def test_servers_without_room_are_refused_before_a_model_is_loaded() -> None:
    check_memory(load_config(overrides=["engine.vllm.memory=0.5"]))
    wanted = r"the vLLM servers need about 100\d\d\.\d GiB of memory, but the free memory of this machine is"
    with pytest.raises(EngineError, match=wanted):
        check_memory(load_config(overrides=["engine.vllm.memory=10000"]))


def test_the_file_cache_counts_as_available_memory(tmp_path: Path) -> None:
    table = tmp_path / "meminfo"
    table.write_text("MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable: 5000 kB\nCached: 4990 kB\n")
    assert available_memory(table) == 5000 * 1024
