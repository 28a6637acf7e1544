"""Access to the Hugging Face Hub, or to the local cache if the Hub cannot be reached.

Without a network, Hugging Face libraries would retry for most of a minute and then fail. Covey
therefore tests the connection first, and limits Hugging Face libraries to their local cache if the
test fails.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

ENDPOINT = "https://huggingface.co"
SECONDS = 3.0
"""Maximum seconds to wait until the hub accepts a connection."""
OFFLINE = "HF_HUB_OFFLINE"
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def offline_if_unreachable() -> bool:
    """Return whether Hugging Face's offline mode is on; turn it on if the Hub is unreachable."""
    if os.environ.get(OFFLINE, "").upper() in {"1", "ON", "YES", "TRUE"}:
        return True
    if any(os.environ.get(name) for name in PROXIES) or reachable():
        return False
    os.environ[OFFLINE] = "1"  # for libraries and processes that start later
    loaded = sys.modules.get("huggingface_hub.constants")
    if loaded is not None:
        loaded.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return True


def in_hub_cache(model: str) -> bool:
    """Return whether any file of a hub model is in the local cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE) / f"models--{model.replace('/', '--')}").is_dir()


def reachable(endpoint: str = "") -> bool:
    """Return whether the Hub accepts a connection within `SECONDS`, including DNS lookup."""
    parts = urlsplit(endpoint or os.environ.get("HF_ENDPOINT", ENDPOINT))
    place = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    found = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(place, timeout=SECONDS).close()
            found.set()
        except OSError:
            pass

    # A DNS lookup has no time limit of its own, so it runs in a thread.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return found.is_set()
