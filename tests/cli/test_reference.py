"""`covey reference serve`, and runs that ask it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from covey.cli.main import run as covey
from covey.embedded import CHECKPOINT
from tests.processes import forked
from tests.reference.servers import Server, fork_server, new_process, wait_for_text

SETTINGS = (
    "model.device=cpu", "train.steps=4", "evaluate.every=0", "rollout.prompts_per_step=3",
    "rollout.group_size=4", "train.mini_batches=2", "objective.beta=0.1",
    "optimizer.learning_rate=1e-3", "train.micro_batch_tokens=200",
)  # fmt: skip


def arguments(path: Path, *more: str) -> list[str]:
    overrides = [word for setting in (*SETTINGS, *more) for word in ("--set", setting)]
    return ["train", "--run", str(path), *overrides]


def steps(path: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def test_a_server_that_is_killed_and_restarted_changes_nothing(tmp_path: Path) -> None:
    server = fork_server(tmp_path / "first", "embedded")
    where = ("reference.kind=server", f"reference.url={server.url}")
    assert covey(arguments(tmp_path / "calm", *where)) == 0
    output = tmp_path / "output"
    child = forked(lambda: covey(arguments(tmp_path / "storm", *where)), output)
    wait_for_text(tmp_path / "storm/steps.jsonl", "\n")
    server.kill()
    wait_for_text(output, "cannot be reached: .*waiting up to 300 s")
    again = fork_server(tmp_path / "second", "embedded", port=server.port)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    again.kill()
    assert (code, "is back" in output.read_text()) == (0, True), output.read_text()
    assert steps(tmp_path / "storm") == steps(tmp_path / "calm")
    assert len(steps(tmp_path / "storm")) == 4
    # The same as a copy in the run's own process says.
    assert covey(arguments(tmp_path / "here")) == 0
    for row, other in zip(steps(tmp_path / "calm"), steps(tmp_path / "here"), strict=True):
        assert row["objective/kl_avg"] == pytest.approx(other["objective/kl_avg"], abs=1e-5)
    environment = json.loads((tmp_path / "calm/environment.json").read_text())
    assert environment["reference"].startswith(f"server {server.url} e4e2f345")


def test_a_server_with_other_weights_is_not_gone_on_with(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = fork_server(tmp_path / "first", "embedded")
    where = ("reference.kind=server", f"reference.url={server.url}", "train.steps=1")
    assert covey(arguments(tmp_path / "run", *where)) == 0
    server.kill()
    record = tmp_path / "run/checkpoints/000001/reference.json"
    assert json.loads(record.read_text())["weights"].startswith("e4e2f345")
    # A fork of a process that has computed in bfloat16 cannot.
    with new_process("embedded", "--dtype", "bfloat16", port=server.port):
        assert covey(["train", "--resume", str(tmp_path / "run")]) == 1
    assert "has other weights: expected e4e2f345" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--host", "0.0.0.0"], 2, "--host 0.0.0.0 makes the server reachable from other machines"),
        (["--token-env", "NO_SUCH_TOKEN"], 2, "NO_SUCH_TOKEN: this environment variable"),
        (["--model", "/no/such/model"], 1, "cannot load '/no/such/model'"),
        (["--max-tokens", "0"], 2, "--max-tokens"),
        (["--host", "203.0.113.7", "--token-env", "PATH"], 2, "--host 203.0.113.7 --port 0"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    flags: list[str], code: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--model" in flags else ["--model", "embedded"]
    assert covey(["reference", "serve", *model, "--port", "0", *flags]) == code
    said = capfd.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert covey(["reference", "serve", "--model", "embedded", "--port", "0"]) == 2
    said = capfd.readouterr().err
    assert said == f"covey: the reference server needs {package}: pip install 'covey[server]'\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_server_without_a_traceback(number: signal.Signals, tmp_path: Path) -> None:
    server = fork_server(tmp_path / "output", "embedded")
    with urllib.request.urlopen(f"{server.url}/health", timeout=60) as response:
        assert response.status == 200
    os.kill(server.pid, number)
    code = os.waitstatus_to_exitcode(os.waitpid(server.pid, 0)[1])
    assert code == (130 if number == signal.SIGINT else -signal.SIGTERM)
    assert "Traceback" not in (tmp_path / "output").read_text()


def test_a_port_in_use_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # Before the model is looked for.
        assert covey(["reference", "serve", "--model", "no/model", "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use; choose another" in capfd.readouterr().err


def test_a_chat_template_that_nobody_can_use_is_no_hindrance(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(CHECKPOINT, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ raise_exception('tools are required') }}")
    with socket.create_server(("127.0.0.1", 0)) as taken:  # found out once the model is there
        port = str(taken.getsockname()[1])
        assert covey(["reference", "serve", "--model", str(model), "--port", port]) == 2
    assert "Address already in use" in capfd.readouterr().err


def test_a_url_where_nothing_listens_gives_up_and_makes_no_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where = ("reference.kind=server", "reference.url=http://127.0.0.1:1", "reference.patience=0.2")
    assert covey(arguments(tmp_path / "run", *where)) == 1
    assert "cannot be reached" in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()
    assert Server(1, "http://127.0.0.1:1").port == 1
