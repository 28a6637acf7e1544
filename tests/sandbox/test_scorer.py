"""Scoring functions that misbehave in every way: each costs its own text, and no other."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.errors import ConfigError, RewardError
from covey.sandbox import Limits, require_isolation
from covey.sandbox.scorer import Sandboxed

try:
    require_isolation()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

LIMITS = Limits(
    cpu_seconds=1, wall_seconds=1.5, memory_bytes=512 << 20, processes=2, file_bytes=1 << 20
)
SCORER = """
import os, signal, sys, time

seen = []

def load():
    print("loading")

def prepare(trusted):
    if trusted == "broken":
        raise ValueError("no such entry")
    return trusted

def score(prepared, text):
    seen.append(text)
    if text == "count":
        return len(seen) / 10
    if text == "files":
        return len(os.listdir("/tmp")) / 10
    names = dict(globals())
    exec(text, names)
    return names.get("given", 0.0)
"""
FORGERIES = {
    "replace": "sys.modules[__name__].score = lambda *_: 1.0; given = 0.25",
    "kill the server": "os.kill(1, signal.SIGKILL); given = 0.25",
    "write into every file": (
        "for file in range(0, 64):\n"
        "    try: os.write(file, b'1.0\\n1.0\\n1.0\\n')\n"
        "    except OSError: pass\n"
        "given = 0.25"
    ),
    "leave a file": "open('/tmp/x', 'w').write('1.0'); given = 0.25",
    "leave a process": "os.fork() or time.sleep(60); given = 0.25",
    "hang": "while True: pass",
    "sleep": "time.sleep(60)",
    "memory": "x = bytearray(2 << 30)",
    "crash": "os.kill(os.getpid(), signal.SIGSEGV)",
    "leave": "os._exit(0)",
    "raise": "raise SystemExit(1)",
    "recursion": "f = lambda: f(); f()",
    "too large": "given = 2.0",
    "not a number": "given = float('nan')",
    "many words": "for _ in range(99):\n    os.write(3, b'9' * 65536)",
}
SCORED = {"replace", "kill the server", "leave a file"}


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandboxed]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "naughty_scorer.py").write_text(SCORER)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        made = Sandboxed(modules=("naughty_scorer",), limits=LIMITS)
        yield made
        made.close()


@pytest.mark.parametrize("name", FORGERIES)
def test_a_text_can_hurt_only_its_own_score(scorer: Sandboxed, name: str) -> None:
    started = time.monotonic()
    score = scorer.score("", FORGERIES[name])
    assert time.monotonic() - started < LIMITS.wall_seconds + 1
    assert score == (0.25 if name in SCORED else None)
    assert scorer.score("", "count") == 0.1
    assert scorer.score("", "files") == 0.0
    assert scorer.score("", "given = 0.5") == 0.5


def test_nothing_outside_can_be_reached(scorer: Sandboxed, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert scorer.score("", f"open({str(tmp_path / 'x')!r}, 'w')") is None
    assert scorer.score("", "import socket; socket.socket()") is None
    assert scorer.score("", "import covey.rewards") is None
    assert scorer.score("", "given = float(len(os.environ.get('HOME', '')) < 5)") == 1.0
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_cannot_be_prepared_is_an_error_and_no_score(scorer: Sandboxed) -> None:
    with pytest.raises(RewardError, match="ValueError: no such entry"):
        scorer.score("broken", "given = 1.0")
    assert scorer.score("", "given = 1.0") == 1.0


def test_a_sandbox_that_was_killed_is_started_again(scorer: Sandboxed) -> None:
    assert scorer.score("", "given = 1.0") == 1.0
    assert scorer._process
    os.killpg(scorer._process.pid, signal.SIGKILL)
    assert scorer.score("", "given = 0.5") == 0.5


def test_threads_take_turns(scorer: Sandboxed) -> None:
    scores: dict[int, float | None] = {}

    def ask(number: int) -> None:
        scores[number] = scorer.score("", f"given = {number / 10}")

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == {n: n / 10 for n in range(8)}


def test_a_sandbox_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RewardError, match=r"sandbox: the sandbox did not start: .*\w"):
        Sandboxed(modules=("covey.errors",), limits=LIMITS).score("", "x")


def test_without_isolation_limits_hold_as_well(scorer: Sandboxed) -> None:
    unsafe = Sandboxed(modules=scorer.modules, limits=LIMITS, unsafe=True)
    assert unsafe.score("", "given = 0.5") == 0.5
    assert unsafe.score("", "while True: pass") is None
    assert unsafe.score("", "count") == 0.1
    unsafe.close()
