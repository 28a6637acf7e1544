"""Without a network, hub libraries are told so at once."""

from __future__ import annotations

import os
import socket
import time

import pytest

from covey import hub_access
from covey.hub_access import OFFLINE, PROXIES, offline_if_unreachable, reachable


def test_an_open_port_is_reachable_and_a_closed_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reachable(f"http://127.0.0.1:{port}")
    began = time.monotonic()
    assert not reachable(f"http://127.0.0.1:{port}")
    assert time.monotonic() - began < 5


def test_an_unreachable_hub_switches_libraries_to_their_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(OFFLINE, "")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert offline_if_unreachable()
    assert os.environ[OFFLINE] == "1"
    assert constants.HF_HUB_OFFLINE is True
    monkeypatch.setattr(hub_access, "SECONDS", 0.0)
    assert offline_if_unreachable()  # known from now on, without another connection
