"""A damaged run folder: no command ends in a traceback or deletes anything, and what is good is offered.

One small run is made, copied for each kind of damage, and given to every command that reads a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from covey.cli.main import run as covey
from covey.lab.compare.comparison import RunOutcome, write_design, write_outcome
from covey.lab.compare.design import Request, design_comparison

SETTINGS = (
    "model.device=cpu", "train.steps=3", "train.mini_batches=1", "save.every=1", "save.keep=9",
    "evaluate.every=3", "evaluate.prompts=2", "rollout.prompts_per_step=2", "rollout.group_size=2",
    "rollout.max_tokens=6", "save.samples_every=3",
)  # fmt: skip
RECORDS = ("steps.jsonl", "eval.jsonl", "checkpoints.jsonl")
NEWEST = "checkpoints/000003"
ANSWERS = ("rollouts/", "evaluations/", "outcome.json")
GARBAGE = bytes(range(128, 256)) * 8


@dataclass(frozen=True)
class Damage:
    """What happens to a run, and what commands then say."""

    do: Callable[[Path], object]
    named: str | None = None
    """The file that some command names on stderr."""
    offered: int | None = None
    """The step that a resume offers instead of going on; None: it goes on, or says what to do."""

    @property
    def of_answers(self) -> bool:
        """Whether only files were touched that a finished run does not open when it is resumed."""
        return self.named is not None and self.named.startswith(ANSWERS)


def write(name: str, data: bytes | str) -> Callable[[Path], object]:
    raw = data.encode() if isinstance(data, str) else data
    return lambda run: (run / name).write_bytes(raw)


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda run: os.truncate(run / name, size)


def remove(name: str) -> Callable[[Path], object]:
    def do(run: Path) -> None:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()

    return do


def folder(name: str) -> Callable[[Path], object]:
    def do(run: Path) -> None:
        if (run / name).exists():
            remove(name)(run)
        (run / name).mkdir()
        (run / name / "mine.txt").write_text("mine")

    return do


def loop(name: str) -> Callable[[Path], object]:
    def do(run: Path) -> None:
        remove(name)(run)
        (run / name).symlink_to(run / name)

    return do


def pipe(name: str) -> Callable[[Path], object]:
    def do(run: Path) -> None:
        if (run / name).exists():
            (run / name).unlink()
        os.mkfifo(run / name)

    return do


def line(name: str, number: int, text: bytes | str) -> Callable[[Path], object]:
    """Put something in the place of one line."""
    raw = text.encode() if isinstance(text, str) else text

    def do(run: Path) -> None:
        lines = (run / name).read_bytes().split(b"\n")
        lines[number - 1] = raw
        (run / name).write_bytes(b"\n".join(lines))

    return do


def value(name: str, number: int, key: str, new: object) -> Callable[[Path], object]:
    """Change one value of one line of JSON."""

    def do(run: Path) -> None:
        row = json.loads((run / name).read_text().split("\n")[number - 1])
        assert key in row
        line(name, number, json.dumps({**row, key: new}))(run)

    return do


def flip(name: str) -> Callable[[Path], object]:
    """Change one bit in the middle of a file."""

    def do(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        data[len(data) // 2] ^= 1
        (run / name).write_bytes(data)

    return do


def order(name: str, *numbers: int) -> Callable[[Path], object]:
    def do(run: Path) -> None:
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(lines[number - 1] for number in numbers))

    return do


def replaced(name: str, old: str, new: str) -> Callable[[Path], object]:
    def do(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new))

    return do


def both(*parts: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda run: [part(run) for part in parts]


def foreign(run: Path) -> None:
    (run / "notes.txt").write_text("mine")
    (run / "checkpoints/best").mkdir()
    (run / "checkpoints/best/model.safetensors").write_bytes(GARBAGE)
    (run / "checkpoints/2024").write_text("mine")
    (run / "checkpoints/٣").mkdir()
    (run / "rollouts/mine.jsonl").write_bytes(GARBAGE)
    (run / NEWEST / "mine.txt").write_text("mine")
    (run / "superseded").mkdir()
    (run / "superseded/1").write_text("mine")


ROLLOUTS, ITEMS = "rollouts/000003.jsonl", "evaluations/000003.jsonl"
STATE, MODEL, MOMENTS = (
    f"{NEWEST}/{name}" for name in ("covey.json", "model.safetensors", "optimizer.safetensors")
)
SUMS = f"{NEWEST}/SHA256SUMS"
OLD = both(*(remove(f"checkpoints/00000{step}/SHA256SUMS") for step in (1, 2, 3)))
"""Makes a run of an older version, whose checkpoints have no digests."""

DAMAGES = {
    # Records of steps.
    "steps: empty": Damage(write("steps.jsonl", "")),
    "steps: missing": Damage(remove("steps.jsonl")),
    "steps: cut": Damage(cut("steps.jsonl", 700)),
    "steps: garbage": Damage(write("steps.jsonl", GARBAGE + b"\n" + GARBAGE), "steps.jsonl line 1"),
    "steps: a line that is no JSON": Damage(line("steps.jsonl", 2, "{"), "steps.jsonl line 2"),
    "steps: not UTF-8": Damage(line("steps.jsonl", 2, b'{"step": "\xff"}'), "steps.jsonl line 2"),
    "steps: a list": Damage(line("steps.jsonl", 2, "[1, 2]"), "steps.jsonl line 2"),
    "steps: a huge line": Damage(
        line("steps.jsonl", 2, '{"step": ' + "9" * 5_000_000 + "}"), "steps.jsonl line 2"
    ),
    "steps: deep": Damage(line("steps.jsonl", 2, "[" * 200_000), "steps.jsonl line 2"),
    "steps: NaN": Damage(line("steps.jsonl", 3, '{"step": 3, "objective/scores": NaN}')),
    "steps: too large": Damage(
        line("steps.jsonl", 3, '{"step": 3, "lr": 1e999}'), "steps.jsonl line 3"
    ),
    "steps: text for a number": Damage(
        value("steps.jsonl", 3, "objective/scores", "high"), "steps.jsonl line 3"
    ),
    "steps: twice": Damage(order("steps.jsonl", 1, 2, 2, 3), "steps.jsonl: steps are repeated"),
    "steps: out of order": Damage(order("steps.jsonl", 3, 1, 2), "steps.jsonl: steps are repeated"),
    "steps: a folder": Damage(folder("steps.jsonl"), "steps.jsonl"),
    "steps: a loop": Damage(loop("steps.jsonl"), "steps.jsonl"),
    "steps: a pipe": Damage(pipe("steps.jsonl"), "steps.jsonl"),
    # Evaluations.
    "eval: empty": Damage(write("eval.jsonl", "")),
    "eval: cut": Damage(cut("eval.jsonl", 90)),
    "eval: an empty object": Damage(line("eval.jsonl", 2, "{}"), "eval.jsonl line 2"),
    "eval: no interval": Damage(
        value("eval.jsonl", 2, "greedy", {"value": 1}), "eval.jsonl line 2"
    ),
    "eval: parts of text": Damage(value("eval.jsonl", 2, "parts", {"a": "b"}), "eval.jsonl line 2"),
    "eval: a folder": Damage(folder("eval.jsonl"), "eval.jsonl"),
    "items: garbage": Damage(write(ITEMS, GARBAGE + b"\n{}\n"), f"{ITEMS} line 1"),
    "items: a folder": Damage(folder("evaluations"), None),
    # Answers.
    "rollouts: cut": Damage(cut(ROLLOUTS, 1500)),
    "rollouts: garbage": Damage(write(ROLLOUTS, GARBAGE + b"\n"), f"{ROLLOUTS} line 1"),
    "rollouts: text for a reward": Damage(value(ROLLOUTS, 1, "reward", "x"), f"{ROLLOUTS} line 1"),
    "rollouts: no tokens": Damage(value(ROLLOUTS, 2, "tokens", [])),
    "rollouts: a token too large": Damage(value(ROLLOUTS, 2, "tokens", [-1]), f"{ROLLOUTS} line 2"),
    "rollouts: half a character": Damage(value(ROLLOUTS, 1, "text", "\ud800\x1b[2J")),
    "rollouts: a file": Damage(both(remove("rollouts"), write("rollouts", "mine"))),
    # Environment and configuration.
    "environment: missing": Damage(remove("environment.json"), "environment.json"),
    "environment: a list": Damage(write("environment.json", "[]"), "environment.json"),
    "environment: wrong types": Damage(
        write("environment.json", '{"threads": "x", "command": 3, "packages": []}'),
        "environment.json",
    ),
    "config: edited": Damage(
        replaced("config.toml", "max_grad_norm = 1.0", "max_grad_norm = 0.5"),
        "optimizer.max_grad_norm was 1.0 and is 0.5",
    ),
    "config: shortened": Damage(
        write("config.toml", "[train]\nsteps = 3\n[evaluate]\nprompts = 2\n"),
        "config.toml was edited",
    ),
    "config: garbage": Damage(write("config.toml", GARBAGE), "config.toml"),
    "config: missing": Damage(remove("config.toml"), "config.toml"),
    # The lock.
    "lock: stale": Damage(write(".lock", "12345")),
    "lock: a folder": Damage(folder(".lock"), ".lock"),
    # Checkpoints.
    "checkpoints: missing": Damage(remove("checkpoints"), "checkpoints contains no checkpoint", 0),
    "checkpoints: a file": Damage(
        both(remove("checkpoints"), write("checkpoints", "mine")), "checkpoints contains no", 0
    ),
    "checkpoints: newest missing": Damage(
        remove(NEWEST), "checkpoints contains no checkpoint after step 2", 2
    ),
    "checkpoints: newest a loop": Damage(loop(NEWEST), NEWEST, 2),
    "checkpoints: missing, of an older version": Damage(
        both(remove("checkpoints"), remove("checkpoints.jsonl")), "checkpoints contains no", 0
    ),
    "checkpoints: half written": Damage(cut(MODEL, 5000), MODEL, 2),
    "checkpoints: one bit": Damage(flip(MODEL), MODEL, 2),
    "checkpoints: one bit of moments": Damage(flip(MOMENTS), MOMENTS, 2),
    "checkpoints: no tokenizer": Damage(
        remove(f"{NEWEST}/tokenizer.json"), f"{NEWEST}/tokenizer.json", 2
    ),
    "checkpoints: state of garbage": Damage(write(STATE, GARBAGE), STATE, 2),
    "checkpoints: two are damaged": Damage(
        both(flip(MODEL), flip("checkpoints/000002/model.safetensors")), MODEL, 1
    ),
    "checkpoints: wrong digest": Damage(
        lambda run: (run / SUMS).write_text("0" * 64 + (run / SUMS).read_text()[64:]), NEWEST, 2
    ),
    "checkpoints: digests of garbage": Damage(write(SUMS, GARBAGE), SUMS, 2),
    "checkpoints: of another step": Damage(
        both(OLD, replaced(STATE, '"step": 3', '"step": 7')), NEWEST, 2
    ),
    "older version: state a list": Damage(both(OLD, write(STATE, "[]")), NEWEST, 2),
    "older version: state of wrong types": Damage(
        both(OLD, write(STATE, '{"step": 3, "version": 3, "episode": [], "beta": "x"}')), NEWEST, 2
    ),
    "older version: half written": Damage(both(OLD, cut(MODEL, 5000)), NEWEST, 2),
    "older version: well": Damage(both(OLD, remove("checkpoints.jsonl"))),
    "list of checkpoints: garbage": Damage(write("checkpoints.jsonl", GARBAGE + b"\n"), "line 1"),
    "list of checkpoints: a folder": Damage(folder("checkpoints.jsonl"), "checkpoints.jsonl"),
    "outcome: garbage": Damage(write("outcome.json", GARBAGE), "outcome.json"),
    "outcome: wrong types": Damage(write("outcome.json", '{"key": 1}'), "outcome.json"),
    "foreign files": Damage(foreign),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    overrides = [word for setting in SETTINGS for word in ("--set", setting)]
    assert covey(["train", "--run", str(path), *overrides]) == 0
    write_outcome(path, RunOutcome(key="k", state="done"))
    return path


OPENED: list[str] = []
"""Paths that were opened or listed while `watching`. An audit hook cannot be removed."""
watching = False


def note(event: str, arguments: tuple[object, ...]) -> None:
    if watching and event in ("open", "os.listdir", "os.scandir"):
        OPENED.append(str(arguments[0]))


@pytest.fixture(scope="module")
def reads(
    whole: Path, compared: object, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, set[str]]:
    """The files of a run that each slow command opens."""
    global watching
    sys.addaudithook(note)
    place, found = tmp_path_factory.mktemp("reads"), {}
    prepare(place, compared, whole, whole)
    for arguments in slow_commands(place, whole):
        OPENED.clear()
        watching = True
        try:
            assert covey(arguments) == 0
        finally:
            watching = False
        roots = (f"{whole}/", *(f"{place}/compared/runs/{arm}/seed-0/" for arm in ARMS))
        inside = {path.removeprefix(root) for path in OPENED for root in roots if root in path}
        assert inside & {"config.toml", "steps.jsonl"}, arguments
        found[arguments[0]] = inside
    return found


ARMS = ("grpo", "dr_grpo")


def prepare(place: Path, compared: object, run: Path, well: Path) -> None:
    """Put a run beside another, and both into a comparison."""
    (place / "runs").mkdir(exist_ok=True)
    (place / "runs/well").symlink_to(well)
    for arm, folder in zip(ARMS, (run, well), strict=True):
        (place / f"compared/runs/{arm}").mkdir(parents=True)
        (place / f"compared/runs/{arm}/seed-0").symlink_to(folder)
    write_design(place / "compared", compared)  # type: ignore[arg-type]


def slow_commands(place: Path, run: Path) -> list[list[str]]:
    return [
        ["explain", str(run), "--step", "3"],
        ["compare", "--report", str(place / "compared")],
        ["eval", str(run)],
        ["export", str(run), str(place / "exported")],
    ]


def cannot_notice(before: dict[str, str], after: dict[str, str], reads: set[str]) -> bool:
    """Whether only contents of files have changed, and of none that a command opens."""
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    still_files = all(len(tree.get(name, "")) == 64 for name in changed for tree in (before, after))
    return bool(changed) and still_files and not changed & reads


@pytest.fixture(scope="module")
def compared() -> object:
    request = Request(
        source="arithmetic", overrides=(), smoke=False, algorithms=("grpo", "dr_grpo"), arms=(),
        seeds=1, budget="steps", amount=3, threads=1,
    )  # fmt: skip
    return design_comparison(request)


def held(run: Path) -> Counter[str]:
    """Count what a run holds, wherever it stands: lines of records, and whole files."""
    found: Counter[str] = Counter()
    for path in sorted(run.rglob("*")):
        if path.is_file() and path.name != ".lock":
            data = path.read_bytes()
            pieces = data.split(b"\n") if path.name in RECORDS else [data]
            found.update(hashlib.sha256(piece).hexdigest() for piece in pieces if piece)
    return found


@cache
def digest(path: str, changed: int, size: int, inode: int) -> str:
    """Return the digest of a file, which is read again if the system has noted a change."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def digest_of(path: Path) -> str:
    facts = path.stat()
    return digest(str(path), facts.st_ctime_ns, facts.st_size, facts.st_ino)


def tree(run: Path) -> dict[str, str]:
    """Return every name below a run, with the digest of what is in it."""
    return {
        str(path.relative_to(run)): digest_of(path)
        if path.is_file()
        else "link" if path.is_symlink() else "folder"
        for path in sorted(run.rglob("*"))
        if path.name != ".lock"
    }  # fmt: skip


def ends_in_one_line(code: int, err: str) -> bool:
    """Whether a command that failed says so in one line of its own, its last."""
    return code == 0 or (
        code in (1, 2) and err.rstrip("\n").rpartition("\n")[2].startswith("covey: ")
    )


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_run_is_read_without_a_traceback_and_nothing_is_deleted(
    damage: Damage, whole: Path, compared: object, reads: dict[str, set[str]], tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = tmp_path / "runs/run"
    shutil.copytree(whole, run)
    prepare(tmp_path, compared, run, whole)
    good = tree(run)
    damage.do(run)
    before, kept = tree(run), held(run)
    said = ""
    looking = [
        ["runs", str(tmp_path / "runs")],
        ["runs", str(tmp_path / "runs"), "--json"],
        ["runs", str(run)],
        ["runs", str(run), "--step", "3"],
        *(
            command
            for command in slow_commands(tmp_path, run)
            if not cannot_notice(good, before, reads[command[0]])
        ),
    ]
    if damage.named is not None and "config.toml" in damage.named:
        looking += [
            ["plan", str(run / "config.toml")],
            ["train", "--resume", str(run), "--print-config"],
        ]
    for arguments in looking:
        code = covey(arguments)
        out, err = capfd.readouterr()
        said += err
        assert ends_in_one_line(code, err), (arguments, code, err)
        assert tree(run) == before, arguments
        if arguments[:2] == [
            "runs",
            str(tmp_path / "runs"),
        ]:  # one bad run does not hide the others
            assert (code, "well" in out) == (0, True)
        assert "--report" not in arguments or code == 0
    if damage.of_answers:
        assert damage.named is None or damage.named in said
        return
    code = covey(["train", "--resume", str(run)])
    out, err = capfd.readouterr()
    assert ends_in_one_line(code, err), err
    assert held(run) >= kept
    assert damage.named is None or damage.named in said + out + err
    if damage.offered is None:
        return
    assert code == 1
    assert tree(run) == before
    offered = re.search(r"covey (train --resume .* --step (\d+))$", err.strip())
    assert offered is not None, err
    assert int(offered[2]) == damage.offered
    if (run / "checkpoints").is_dir() or not (run / "checkpoints").exists():
        assert covey(shlex.split(offered[1])) == 0
        assert held(run) >= kept
        assert (run / NEWEST / "model.safetensors").read_bytes() == (
            whole / NEWEST / "model.safetensors"
        ).read_bytes()


def test_there_are_forty_kinds_of_damage() -> None:
    assert len(DAMAGES) >= 40
