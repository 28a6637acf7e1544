"""Trackers of other packages, with the real packages, offline: the numbers of the run folder."""

from __future__ import annotations

import json
import os
import random
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import run as covey
from covey.errors import ConfigError
from covey.records.folder import RunFolder
from covey.records.metric_registry import is_number
from covey.records.trackers import JsonlTracker, Tracker, Trackers
from covey.records.trackers.external import LONGEST, sample_rows
from covey.records.trackers.registry import TRACKERS, check_trackers, make_trackers

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages
os.environ.setdefault("TRACKIO_DIR", tempfile.mkdtemp())  # read when trackio is imported
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"

Series = dict[int, dict[str, float]]
SETTINGS = {"save": {"samples_every": 4}}
HOSTILE = "<script>alert(1)</script><img onerror=x> \x1b[31m\u202e\x00 | `a` ![](http://x/y)"


def of_tensorboard(run: Path) -> Series:
    """Read scalars as scripts do, and texts as TensorBoard itself does."""
    from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator

    files, every = str(run / "tensorboard"), {"scalars": 0, "tensors": 0}
    scalars = event_accumulator.EventAccumulator(files, size_guidance=every)
    shown = plugin_event_accumulator.EventAccumulator(files, size_guidance=every)
    scalars.Reload()
    shown.Reload()
    names, found = scalars.Tags()["scalars"], Series()
    read = [(name, event.step, event.value) for name in names for event in scalars.Scalars(name)]
    for name in set(shown.Tags()["tensors"]) - set(names):
        read += [(name, event.step, 0.0) for event in shown.Tensors(name)]
    for name, step, value in read:
        values = found.setdefault(step, {})
        assert name not in values, f"{name} comes twice in step {step}"
        values[name] = value
    return found


def stored(name: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return numbers as a tracker stores them: in TensorBoard's files, scalars are float32."""
    single = struct.Struct("f")
    return {
        n: single.unpack(single.pack(v))[0] if name == "tensorboard" else v
        for n, v in values.items()
    }


def log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, which W&B uses."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def of_wandb(run: Path) -> Series:
    from wandb.proto import wandb_internal_pb2

    def records(file: Path) -> list[Any]:
        read = wandb_internal_pb2.Record.FromString
        return [read(data) for data in log_records(file.read_bytes())]

    found: Series = {}
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        limit = time.monotonic() + 20
        while not any(r.HasField("exit") for r in records(file)) and time.monotonic() < limit:
            time.sleep(0.1)  # a process of W&B's own writes the file
        for record in records(file):
            if not record.HasField("history"):
                continue
            items = {
                i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item
            }
            step = items.pop("_step")
            assert step not in found, f"step {step} comes twice"
            found[step] = {name: v for name, v in items.items() if name[0] != "_"}
    return found


def of_trackio(run: Path) -> Series:
    from trackio.sqlite_storage import SQLiteStorage

    known = json.loads((run / "trackio.json").read_text())["id"]
    found: Series = {}
    for row in SQLiteStorage.get_logs("covey", f"{run.name}-{known[:4]}"):
        values = {n: v for n, v in row.items() if n not in ("step", "__step", "timestamp")}
        before = found.setdefault(row["step"], {})
        assert not before.keys() & values.keys(), f"step {row['step']} comes twice"
        before |= values
    return found


READ: dict[str, Callable[[Path], Series]] = {
    "tensorboard": of_tensorboard, "wandb": of_wandb, "trackio": of_trackio,
}  # fmt: skip


def numbers(run: RunFolder) -> Series:
    rows = [json.loads(line) for line in (run.path / "steps.jsonl").read_text().splitlines()]
    return {row["step"]: {n: v for n, v in row.items() if is_number(v)} for row in rows}


def metrics(step: int) -> dict[str, Any]:
    draw = random.Random(step)
    return {
        "step": step, "tokens": 2**40 + step, "reward_id": "r@1", "objective/scores": draw.random(),
        "objective/kl": draw.gauss(0, 1e-9), "loss/policy_avg": float("nan"),
    }  # fmt: skip


def rollouts(count: int) -> list[dict[str, Any]]:
    row = {
        "prompt": HOSTILE, "text": HOSTILE + "x" * 10**6, "target": "1", "success": True,
        "advantage": None, "finish": "stop", "parts": {"correct": 1.0},
    }  # fmt: skip
    return [{**row, "reward": float(n)} for n in range(count)] + [{**row, "reward": None}]


def logged(tracker: Tracker, done: int, last: int) -> None:
    tracker.started(steps=9, done=done, rollouts=4)
    for step in range(done + 1, last + 1):
        tracker.table("rollouts", step, rollouts(20))
        tracker.step(metrics(step))
    tracker.close()


@pytest.mark.parametrize("name", TRACKERS)
def test_a_resumed_run_continues_its_series(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name, reason=f"needs covey[{name}]")
    run = RunFolder.create(tmp_path / name, "", {})
    (tracker,) = make_trackers([name], run, SETTINGS)
    logged(tracker, done=0, last=5)
    # The last checkpoint was of step 3: steps 4 and 5 are computed again.
    (tracker,) = make_trackers([name], run, SETTINGS)
    logged(tracker, done=3, last=7)
    found = READ[name](run.path)
    assert sorted(found) == list(range(1, 8))
    for step, values in found.items():
        plain = {n: v for n, v in values.items() if not n.startswith("completions")}
        assert plain.keys() - {"step"} == {"tokens", "objective/scores", "objective/kl"}
        assert plain == stored(name, {n: v for n, v in metrics(step).items() if n in plain})
        assert any(n.startswith("completions") for n in values) == (step in (1, 4))


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_one_line_with_the_extra(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("covey.records.trackers.registry.find_spec", lambda package: None)
    assert covey(["train", "arithmetic", "--set", f"trackers={name}"]) == 2
    line = capsys.readouterr().err.strip()
    assert (
        line == f"covey: config: trackers: '{name}' is not installed: pip install 'covey[{name}]'"
    )


def test_wandb_without_a_login_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="needs covey[wandb]")

    def init(**options: Any) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.\nMore")

    monkeypatch.setattr(wandb, "init", init)
    (tracker,) = make_trackers(["wandb"], RunFolder.create(tmp_path / "run", "", {}), SETTINGS)
    with pytest.raises(ConfigError, match="`wandb login`, set WANDB_MODE=offline, or") as found:
        tracker.started(steps=9, done=0, rollouts=4)
    assert str(found.value).endswith("set trackers = []")
    assert "\n" not in str(found.value)
    tracker.close()


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="trackers: 'wandbb' is not a known tracker; did you mean 'wandb'"
    ):
        check_trackers(["wandbb"])


def test_a_table_has_short_plain_text_of_the_highest_and_lowest_rewards() -> None:
    rows = sample_rows(rollouts(40))
    assert [row[3] for row in rows] == [*range(39, 31, -1), *range(7, -1, -1)]
    for row in rows:
        assert all(len(cell) < LONGEST + 200 for cell in row if isinstance(cell, str))
        assert not any(c in "".join(map(str, row)) for c in "\x1b\x00\u202e")


@pytest.mark.slow
def test_a_trained_run_has_the_same_numbers_everywhere(tmp_path: Path) -> None:
    for name in TRACKERS:
        pytest.importorskip(name, reason=f"needs covey[{name}]")
    run = RunFolder(tmp_path / "run")
    words = ["train.steps=2", "rollout.prompts_per_step=2", "rollout.group_size=2", "evaluate.every=2",
             "evaluate.prompts=4", "rollout.max_tokens=16", f"trackers={json.dumps(list(TRACKERS))}"]  # fmt: skip
    sets = [part for word in words for part in ("--set", word)]
    assert covey(["train", "arithmetic", "--run", str(run.path), *sets]) == 0
    wanted = numbers(run)
    assert len(wanted[2]) > 60
    evaluation = run.evaluations()[-1]
    for name, read in READ.items():
        found = read(run.path)
        for step, values in wanted.items():
            wanted_values = stored(name, {n: v for n, v in values.items() if n != "step"})
            assert {n: found[step][n] for n in wanted_values} == wanted_values, name
        greedy = {"greedy": evaluation["greedy"]["value"]}
        assert found[2]["evaluation/greedy"] == stored(name, greedy)["greedy"]
        assert found[2]["evaluation/distinct_answers"] == evaluation["distinct_answers"]


def test_the_run_folder_is_written_before_other_trackers(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "", {})

    class Fails(Tracker):
        def step(self, metrics: Any) -> None:
            raise OSError("the network is down")

    with pytest.raises(OSError, match="the network"):
        Trackers([JsonlTracker(run), Fails()]).step(metrics(1))
    assert list(numbers(run)) == [1]
