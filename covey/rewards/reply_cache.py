"""A cache of an endpoint's replies: one file per request, named by a digest of the request."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import RewardError


@dataclass(frozen=True, slots=True)
class ReplyCache:
    """A folder of replies. Several processes may use the folder at once."""

    folder: str

    def read(self, url: str, body: Mapping[str, Any]) -> str | None:
        """Return the saved reply to a request; None if the file is missing or damaged."""
        try:
            reply = json.loads(self._file(url, body).read_text(encoding="utf-8"))["reply"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return reply if isinstance(reply, str) else None

    def write(self, url: str, body: Mapping[str, Any], reply: str) -> None:
        """Save a reply atomically."""
        file = self._file(url, body)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=file.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as temporary:
                json.dump({"reply": reply}, temporary)
            os.replace(name, file)
        except OSError as error:
            raise RewardError(
                f"cannot write a reply into the cache folder {self.folder!r}: {error}"
            ) from None

    def _file(self, url: str, body: Mapping[str, Any]) -> Path:
        sent = json.dumps([url, body], sort_keys=True).encode()
        name = hashlib.sha256(sent).hexdigest()
        return Path(self.folder) / name[:2] / f"{name}.json"
