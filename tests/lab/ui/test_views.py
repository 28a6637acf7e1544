"""What the server answers: exact numbers, bounded reading, damaged folders, and to whom."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

from covey.cli.main import run as command
from covey.lab.ui import group_views, views
from covey.lab.ui.find_runs import find
from covey.lab.ui.group_views import RolloutIndex, rollout_index
from covey.lab.ui.server import POLICY, Server
from covey.lab.ui.step_table import StepTable, StepTables, column, curve
from covey.lab.ui.views import Site
from covey.records.folder import RunFolder
from tests.lab.ui.sample_runs import add_step, make_run, step_row

Serve = Callable[..., Server]
KEPT = ("objective/scores",)


def get(server: Server, path: str, **query: Any) -> Any:
    with urllib.request.urlopen(f"{server.url}{path}?{urlencode(query)}", timeout=30) as reply:
        return json.load(reply)


def write_steps(path: Path, count: int) -> Path:
    path.mkdir(parents=True)
    file = path / "steps.jsonl"
    file.write_text("".join(json.dumps(step_row(step)) + "\n" for step in range(1, count + 1)))
    return file


def test_a_table_read_in_pieces_is_the_whole_file(tmp_path: Path) -> None:
    table = StepTable(write_steps(tmp_path / "run", 20_000))
    first = table.update(KEPT, 0.0)  # nothing is read, so all of it is sampled
    assert not table.done
    steps = column(first, "step")
    assert steps[0] == 1
    assert steps[-1] > 19_000
    assert 100 <= len(steps) <= 200
    rounds = 0
    while not table.done:
        pieces = table.update(KEPT, 0.01)
        rounds += 1
    assert rounds > 1
    assert column(pieces, "step").tolist() == list(range(1, 20_001))
    assert len(pieces) < 10
    expected = [step_row(step)["objective/scores"] for step in range(1, 20_001)]
    np.testing.assert_array_equal(column(pieces, "objective/scores"), np.float32(expected))
    assert "policy/entropy_avg" in table.names
    assert "policy/entropy_avg" not in pieces[0]  # it was not asked for
    while not table.done or "policy/entropy_avg" not in pieces[0]:
        pieces = table.update(("policy/entropy_avg",), 0.01)
    entropy = [step_row(step)["policy/entropy_avg"] for step in range(1, 20_001)]
    np.testing.assert_array_equal(column(pieces, "policy/entropy_avg"), np.float32(entropy))
    np.testing.assert_array_equal(column(pieces, "objective/scores"), np.float32(expected))


def test_a_curve_has_mean_lowest_and_highest_of_each_interval() -> None:
    columns = {"step": np.arange(1.0, 8.0), "a": np.float32([1, 3, np.nan, 5, 7, 2, 6])}
    assert curve([columns], "a", 3) == {
        "x": [1.5, 4.5, 6.5],
        "mean": [2, 6, 4],
        "low": [1, 5, 2],
        "high": [3, 7, 6],
    }
    assert curve([columns], "a", 10, between=(2, 4)) == {"x": [2, 4], "mean": [3, 5]}
    assert curve([columns], "a", 10, between=(90, 99)) == {"x": [], "mean": []}


def test_a_table_follows_its_file_when_it_grows_and_when_a_resume_cuts_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    table = StepTable(run.path / "steps.jsonl")
    assert column(table.update(KEPT, 1.0), "step").tolist() == [1, 2, 3]
    with table.path.open("a") as file:
        file.write('{"step": 4, "objective/sc')  # half a line
    assert column(table.update(KEPT, 1.0), "step").tolist() == [1, 2, 3]
    with table.path.open("a") as file:
        file.write('ores": 0.5, "new": 1}\n{"step": 3, "objective/scores": 9}\nnot json\n')
    pieces = table.update(KEPT, 1.0)
    assert column(pieces, "step").tolist() == [1, 2, 3, 4]
    assert column(pieces, "objective/scores")[2:].tolist() == [
        9,
        0.5,
    ]  # the last line of a step counts
    assert any("out of order" in note for note in table.notes)
    assert any("line 6 cannot be read" in note for note in table.notes)
    lines = table.path.read_text().splitlines(keepends=True)
    table.path.write_text("".join(lines[:2]))
    assert column(table.update(KEPT, 1.0), "step").tolist() == [1, 2]
    assert table.notes == []


def test_numbers_survive_what_else_a_file_may_hold(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    values = ["0.5", "null", '"0.5"', "true", "1e39", f"1{'0' * 400}", "[1]"]
    lines = [f'{{"step": {n}, "objective/scores": {v}}}\n' for n, v in enumerate(values)]
    file.write_text("".join(lines))
    found = column(StepTable(file).update(KEPT, 1.0), "objective/scores")
    np.testing.assert_array_equal(found, [0.5, np.nan, np.nan, 1, np.inf, np.nan, np.nan])


def test_a_curve_has_seven_digits() -> None:
    values = np.array([0.0, 1 / 3, -2e5 / 3, 1e-9 / 3, 2e20 / 3, np.inf])
    found = curve([{"step": np.arange(6.0), "a": values}], "a", 10)["mean"]
    assert found == [0.0, 0.3333333, -66666.67, 3.333333e-10, 6.666667e19, np.inf]


def test_several_runs_share_a_request_and_its_time(tmp_path: Path) -> None:
    for name in "abc":
        write_steps(tmp_path / name, 20_000)
    site = Site([tmp_path])
    query = {"run": "a\0b\0c", "metrics": "objective/scores", "points": "30"}
    first = views.series(site, query)["runs"]
    assert [run["run"] for run in first] == ["a", "b", "c"]
    assert all(20 <= len(run["curves"]["objective/scores"]["x"]) <= 30 for run in first)
    assert first[2]["partial"]
    assert first[2]["rows"] < 200
    assert first[0]["rows"] > first[1]["rows"]
    while any(run["partial"] for run in views.series(site, query)["runs"]):
        pass
    assert [run["rows"] for run in views.series(site, query)["runs"]] == [20_000] * 3


def test_tables_beyond_the_limit_of_memory_are_dropped(tmp_path: Path) -> None:
    runs = [write_steps(tmp_path / str(n), 100).parent for n in range(4)]
    size = StepTable(runs[0] / "steps.jsonl")
    size.update(KEPT, 9.0)
    tables = StepTables(most_bytes=2 * size.memory)
    for run in runs:
        tables[run].update(KEPT, 9.0)
    tables[runs[0]].update(KEPT, 9.0)
    assert sum(table.memory for table in tables._tables.values()) <= 3 * size.memory
    assert list(tables._tables)[-1] == runs[0]


def test_rollouts_are_read_from_their_place_in_a_large_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    file = run.path / "rollouts/000001.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    with file.open("w") as out:
        for number in range(6000):
            row = {
                **rows[number % 12],
                "prompt_id": f"p{number // 8}",
                "text": f"n{number} " + "é" * 500,
            }
            out.write(json.dumps(row) + "\n")
        out.write('{"cut off')
    index = RolloutIndex(file)
    index.update(0.001)
    assert 0 < index.share < 1
    while not index.done:
        index.update(0.05)
    assert len(index.entries) == 6000
    assert index.notes == [f"{file}: its last line is cut off; it is left out"]
    assert index.row(5000)["text"].startswith("n4999 é")
    assert index.search("N59 É", 30.0) == ({60}, True)
    assert index.search("prompt_id", 30.0) == (set(), True)  # the name of a field is no text


def test_groups_are_sorted_and_filtered(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=1)
    site = Site([tmp_path])

    def ids(**query: str) -> list[str]:
        found = group_views.groups(site, {"run": "run", "step": "1", **query})
        return [row["prompt_id"].removeprefix("arithmetic/") for row in found["groups"]]

    assert ids() == ["1", "2", "3"]
    assert ids(sort="reward") == ["2", "1", "3"]
    assert ids(sort="spread")[0] == "1"
    assert ids(filter="mixed") == ["1", "3"]
    assert ids(filter="flat") == ids(filter="wrong") == ["2"]
    assert ids(filter="unscored") == ["3"]
    assert ids(search="3+3") == ["3"]
    assert (
        group_views.summary([*rollout_index(tmp_path / "run/rollouts/000001.jsonl").entries[:4]])[
            "mean"
        ]
        == 0.5
    )


def test_equal_rewards_have_exactly_their_mean_and_no_spread(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    prompt = run.rollouts(1)[0]
    rows = [{**prompt, "sample": sample, "reward": 0.1} for sample in range(10)]
    run.write_table("rollouts", 1, rows)
    index = rollout_index(run.path / "rollouts/000001.jsonl")
    index.update(10.0)
    found = group_views.summary(index.entries)
    assert (found["mean"], found["spread"]) == (0.1, 0.0)


def test_runs_are_found_in_runs_and_comparisons_but_not_behind_links(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/a")
    make_run(tmp_path / "comparisons/c/runs/grpo/seed-0")
    (tmp_path / "comparisons/c/comparison.toml").write_text("")
    (tmp_path / "runs/link").symlink_to(tmp_path / "comparisons")
    found = find([tmp_path / "runs", tmp_path / "comparisons"])
    assert {place.id: place.kind for place in found.values()} == {
        "a": "run", "c": "comparison", "c/runs/grpo/seed-0": "run",
    }  # fmt: skip
    assert list(find([tmp_path / "runs/a"])) == ["a"]
    rows = views.list_all(Site([tmp_path / "comparisons"]), {})
    assert [row["comparison"] for row in rows["runs"]] == ["c/grpo"]


def damaged(path: Path) -> dict[str, tuple[Path, str]]:
    """Folders with each kind of damage, and what is said of it."""
    kinds = {
        "no config": (lambda run: (run / "config.toml").unlink(), "config.toml is missing"),
        "config": (lambda run: (run / "config.toml").write_text("[[["), "config.toml cannot be read"),
        "no environment": (lambda run: (run / "environment.json").unlink(), "environment.json cannot be read"),
        "environment": (lambda run: (run / "environment.json").write_bytes(b"\xff"), "environment.json cannot be read"),
        "no steps": (lambda run: (run / "steps.jsonl").unlink(), "steps.jsonl is missing"),
        "folder": (lambda run: ((run / "steps.jsonl").unlink(), (run / "steps.jsonl").mkdir()), "a folder"),
        "pipe": (lambda run: ((run / "steps.jsonl").unlink(), os.mkfifo(run / "steps.jsonl")), "not a regular file"),
        "binary": (lambda run: (run / "steps.jsonl").write_bytes(b"\x00\xff\n" * 9), "line 1 cannot be read"),
        "no numbers": (lambda run: (run / "steps.jsonl").write_text('{"step": "x"}\n[1]\n'), "line 1 cannot be read"),
        "evaluations": (lambda run: (run / "eval.jsonl").write_text('{"step": 1}\n'), "eval.jsonl line 1"),
    }  # fmt: skip
    for name, (harm, _) in kinds.items():
        harm(make_run(path / name).path)
    return {name: (path / name, words) for name, (_, words) in kinds.items()}


def test_a_damaged_folder_shows_what_can_be_read_and_says_what_cannot(tmp_path: Path) -> None:
    folders, site = damaged(tmp_path), Site([tmp_path])
    assert len(views.list_all(site, {})["runs"]) == len(folders)
    for name, (_, words) in folders.items():
        found = views.series(site, {"run": name, "metrics": "objective/scores"})["runs"][0]
        assert any(words in note for note in found["notes"]), (name, found["notes"])
        whole = "steps" not in name and name not in ("folder", "pipe", "binary", "no numbers")
        assert len(found["curves"].get("objective/scores", {"x": ()})["x"]) == (
            4 if whole else 0
        ), name
        assert views.details(site, {"run": name})["steps"] == [1, 2, 3, 4]


def test_pages_are_sent_with_a_policy_and_only_known_files_are(
    serve: Serve, tmp_path: Path
) -> None:
    server = serve(tmp_path)
    with urllib.request.urlopen(server.url, timeout=30) as reply:
        assert reply.headers["Content-Security-Policy"] == POLICY
        assert "unsafe" not in POLICY
        assert b'<script type="module" src="app.js">' in reply.read()
    for path in ("../views.py", "%2e%2e/views.py", "static/app.js", "nothing.js", "api/nothing"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(server, path)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server, "api/series", run="../../etc")


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:{}", 200), ("localhost:{}", 200), ("[::1]:{}", 200), ("evil.example:{}", 421), ("127.0.0.1:1", 421),
     ("", 421), ("10.0.0.1:{}", 421), ("[", 421)],
)  # fmt: skip
def test_another_name_in_the_host_header_is_refused(
    serve: Serve, tmp_path: Path, host: str, status: int
) -> None:
    server = serve(tmp_path)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/api/runs", headers={"Host": host.format(server.port)})
    assert connection.getresponse().status == status
    connection.close()


def test_only_requests_with_the_header_start_something(serve: Serve, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    server = serve(tmp_path)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/api/explain?run=run&step=1")
    assert connection.getresponse().status == 403
    assert server.site.jobs._found == {}
    connection.close()


def test_other_addresses_need_the_token(serve: Serve, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    server = serve(tmp_path, host="0.0.0.0")
    assert len(server.token) >= 32

    def ask(path: str, cookie: str = "") -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("GET", path, headers={"Cookie": cookie, "Connection": "close"})
        reply = connection.getresponse()
        reply.read()
        connection.close()
        return reply

    assert ask("/").status == ask("/api/runs").status == ask("/?token=x").status == 401
    assert ask(f"/api/runs?token={server.token}").status == 401
    assert ask("/api/runs", f"covey_token={server.token}x").status == 401
    given = ask(f"/?token={server.token}")
    assert given.status == 303
    cookie = given.headers["Set-Cookie"]
    assert "HttpOnly; SameSite=Strict" in cookie
    assert ask("/api/runs", cookie.partition(";")[0]).status == 200
    assert f"token={server.token}" in server.url


def test_the_command_refuses_a_missing_folder_and_a_port_in_use(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["ui", str(tmp_path / "nothing")]) == 1
    assert "does not exist" in capsys.readouterr().err
    port = serve(tmp_path).port
    assert command(["ui", str(tmp_path), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    started = [sys.executable, "-m", "covey", "ui", str(tmp_path), "--port", "0"]
    # A background job ignores SIGINT, and so would the processes that it starts.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True, preexec_fn=heeds) as process:
        try:
            line = process.stdout.readline()
            address = re.search(r"http://127\.0\.0\.1:\d+/", line).group()
            with urllib.request.urlopen(f"{address}api/runs", timeout=30) as reply:
                assert [run["id"] for run in json.load(reply)["runs"]] == ["run"]
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
    assert line.startswith("1 runs and 0 comparisons")


def test_a_run_that_grows_is_read_on(serve: Serve, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    server = serve(tmp_path)
    asked = {"run": "run", "metrics": "objective/scores,nothing", "axis": "tokens"}

    def scores() -> list[float]:
        return get(server, "api/series", **asked)["runs"][0]["curves"]["objective/scores"]["x"]

    assert scores() == [100, 200]
    add_step(RunFolder(run.path), 3)
    assert scores() == [100, 200, 300]
