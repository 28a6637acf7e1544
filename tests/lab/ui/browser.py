"""Real Chromium, driven over a pipe by its DevTools protocol: nothing else is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WAIT = 60.0


class Browser:
    """One page of headless Chromium."""

    def __init__(self, *, width: int = 1280, height: int = 900) -> None:
        assert CHROMIUM is not None
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        there, write = os.pipe()
        read, back = os.pipe()
        command = [
            "bash", "-c", f'exec "$@" 3<&{there} 4>&{back}', "-",
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}", "--hide-scrollbars", "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, pass_fds=(there, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(there)
        os.close(back)
        self.write, self.read = os.fdopen(write, "wb", buffering=0), os.fdopen(read, "rb")
        self.number, self.events, self.session = 0, [], None
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        target = {"targetId": page["targetId"], "flatten": True}
        self.session = self.send("Target.attachToTarget", **target)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def receive(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self.read.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("chromium has gone")
            data += byte
        return json.loads(data)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip

    def dark(self, on: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        self.send("Page.navigate", url="about:blank")
        self.events.clear()
        self.send("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page, or of the promise it gives."""
        found = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = WAIT) -> Any:
        """Wait until an expression is true, and return it."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(RuntimeError):  # the page is being loaded
                found = self.run(script)
                if found:
                    return found
            time.sleep(0.03)
        text = self.run("document.body.innerText")
        raise AssertionError(f"never true: {script}\n{text[:3000]}\n{self.problems()}")

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element of that kind that contains the text."""
        pick = f"[...document.querySelectorAll({json.dumps(selector)})].find((e) => e.textContent.includes({json.dumps(text)}))"
        self.wait(f"!!{pick}")
        self.run(f"{pick}.click()")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            more = {"text": key} if kind == "keyDown" and len(key) == 1 else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, **more)

    def problems(self) -> list[str]:
        """Return what the page complained about: exceptions, refused scripts, failed requests."""
        self.run("1")
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [
            json.dumps(event["params"])[:600]
            for event in self.events
            if event.get("method") in kinds
        ]

    def picture(self, path: Path) -> None:
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.write.close()
        self.read.close()
        self.profile.cleanup()
