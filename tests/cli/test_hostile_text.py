"""Every command that shows text, on a run whose every text gives orders to a terminal."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress
from rich.table import Table

from covey.cli import main
from covey.cli.main import run
from covey.config import toml_value
from covey.lab.compare.report_files import terminal_report, write_reports
from covey.models.language_model import LanguageModel
from covey.screen import Screen, cell
from tests.lab.compare.sample_comparison import comparison, fill

# A title for the window, a cleared screen, colours in 8-bit codes, text turned around; and markup.
HOSTILE = "\x1b]0;t\x07\x1b[2J\x9b1m\u202ee\u2066\u2069\u200e\u200f\u061c\x00\x7f\r\x08[red]x[/]"
# A name for a folder can hold all but NUL and a slash.
NAME = HOSTILE.replace("\x00", "").replace("/", "")
ORDERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c\u2028\u2029]"
)
SETTINGS = (
    "model.device=cpu", "train.steps=2", "rollout.prompts_per_step=2", "rollout.group_size=4",
    "rollout.max_tokens=12", "objective.beta=0.1", "save.every=1", "save.samples_every=1",
    "evaluate.prompts=2", "task.name=jsonl", "task.skip_bad_rows=true", "reward.name=think_answer",
)  # fmt: skip


def shown(captured: Any) -> str:
    """What reached the terminal, from its bytes; there is something, and no order in it."""
    text = (captured.out + captured.err).decode()
    assert text
    assert ORDERS.findall(text) == []
    return text


def words(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, embedded: LanguageModel) -> tuple[Path, str]:
    """A real run in a folder with such a name, on such prompts; and what it printed."""
    folder = tmp_path_factory.mktemp("hostile")
    file = folder / f"data {NAME}.jsonl"
    rows = [
        {"question": f"{n}{HOSTILE}", "answer": HOSTILE, "kind": f"k{n % 2}{HOSTILE}"}
        for n in range(4)
    ]
    lines = [*map(json.dumps, rows), HOSTILE, json.dumps({"question": 7, HOSTILE: HOSTILE})]
    file.write_text("\n".join(lines))
    path = folder / f"run {NAME}"
    names = ("task.train_file", "task.held_out_file")
    files = [f"{name}={toml_value(str(file))}" for name in names]
    output = folder / "output"
    with pytest.MonkeyPatch.context() as patch, output.open("w", encoding="utf-8") as stream:
        patch.setattr("sys.stdout", stream)
        assert run(["train", "--run", str(path), *words(*SETTINGS, *files)]) == 0
    # The embedded model does not say such things by itself.
    ids = embedded.tokenizer.encode(HOSTILE, add_special_tokens=False)
    for rollouts in path.glob("rollouts/*.jsonl"):
        recorded = [json.loads(line) for line in rollouts.read_text().splitlines()]
        for row in recorded:
            row["text"] = HOSTILE
            row["tokens"] = ids[: len(row["tokens"])] + row["tokens"][len(ids) :]
        rollouts.write_text("".join(json.dumps(row) + "\n" for row in recorded))
    return path, output.read_text(encoding="utf-8")


COMMANDS: dict[str, list[str]] = {
    "runs": ["runs", "PARENT"],
    "runs as JSON": ["runs", "PARENT", "--json"],
    "evaluations": ["runs", "RUN"],
    "answers": ["runs", "RUN", "--step", "2"],
    "answers as JSON": ["runs", "RUN", "--step", "2", "--json"],
    "no such step": ["runs", "RUN", "--step", "9"],
    "explain": ["explain", "RUN", "--step", "2"],
    "explain one": ["explain", "RUN", "--step", "2", "--rollout", "1"],
    "explain as JSON": ["explain", "RUN", "--step", "2", "--json"],
    "replay": ["explain", "RUN", "--step", "2", "--replay", "grpo,gspo"],
    "eval": ["eval", "RUN", "--by", "kind", "--against", "embedded"],
    "eval as JSON": ["eval", "RUN", "--json"],
    "score": ["rewards", "score", "RUN/rollouts/000002.jsonl", "--config", "RUN/config.toml"],
    "lab": ["rewards", "lab", "RUN/config.toml"],
    "plan": ["plan", "RUN/config.toml"],
    "plan as JSON": ["plan", "RUN/config.toml", "--json"],
    "print": ["train", "RUN/config.toml", "--print-config"],
    "resume": ["train", "--resume", "RUN"],
    "export": ["export", "RUN", "OUT"],
    "no run": ["explain", f"/nothing/{NAME}", "--step", "1"],
    "no value": ["train", *words(f"train.steps={NAME}")],
    "no key": ["plan", *words(f"train.{NAME}=1")],
    "no algorithm": ["algorithms", NAME],
    "no reward": ["rewards", "list", NAME],
    "no command": [NAME],
    "no option": ["runs", f"--{NAME}"],
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_sends_orders_to_the_terminal(
    name: str, hostile: tuple[Path, str], tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = hostile[0]
    places = {"PARENT": str(path.parent), "RUN": str(path), "OUT": str(tmp_path / NAME)}
    arguments = [re.sub("PARENT|RUN|OUT", lambda m: places[m[0]], word) for word in COMMANDS[name]]
    if name == "resume":
        copy = shutil.copytree(path, tmp_path / NAME)
        arguments[-1] = str(copy)
    run(arguments)
    text = shown(capfdbinary.readouterr())
    assert "Traceback" not in text
    if not name.startswith(("eval", "score", "lab", "plan", "explain as")):
        assert r"\x1b" in text or r"\u001b" in text, text
    if name == "export":
        card = (tmp_path / NAME / "README.md").read_text(encoding="utf-8")
        assert r"\x1b]0;t\x07" in card
        assert ORDERS.findall(card) == []


def test_a_completion_is_seen_as_it_is(
    hostile: tuple[Path, str], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(["runs", str(hostile[0]), "--step", "2"]) == 0
    seen = r"\x1b]0;t\x07\x1b[2J\x9b1m\u202ee\u2066\u2069\u200e\u200f\u061c\x00\x7f\r\x08[red]x[/]"
    assert seen in shown(capfdbinary.readouterr())


def test_what_a_run_prints_and_writes_for_people_holds_no_orders(hostile: tuple[Path, str]) -> None:
    path, printed = hostile
    assert "bad rows skipped" in printed
    assert r"\x1b" in printed
    pages = [page.read_text(encoding="utf-8") for page in path.glob("samples/*.md")]
    config = (path / "config.toml").read_text(encoding="utf-8")
    assert len(pages) == 2
    for text in (printed, config, *pages):
        assert ORDERS.findall(text) == []


def test_reports_of_a_comparison_hold_no_orders(tmp_path: Path) -> None:
    changes = {
        "name": HOSTILE,
        "command": HOSTILE,
        "environment": {"note": HOSTILE},
        "config_toml": HOSTILE,
        "findings": ({"title": HOSTILE, "why": HOSTILE, "remedy": HOSTILE, "docs": HOSTILE},),
    }
    made = comparison(**changes)
    write_reports(fill(tmp_path, HOSTILE), made)
    for name in ("report.html", "report.md", "report.json"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        ours = re.sub("<script>.*?</script>", "", text, flags=re.DOTALL)  # plotly's own program
        assert ORDERS.findall(ours) == [], name
        assert (r"\u001b]0;t" if name == "report.json" else r"x1b") in text
    assert json.loads((tmp_path / "report.json").read_text())["name"] == HOSTILE
    screen = Screen(file=io.StringIO(), width=200)
    screen.print(terminal_report(made))
    assert ORDERS.findall(screen.file.getvalue()) == []


def test_a_terminal_gets_colours_of_ours_and_nothing_else() -> None:
    screen = Screen(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=300)
    screen.print(HOSTILE, style="red", markup=False)
    table = Table(HOSTILE.replace("[", "("), title=cell(HOSTILE))
    table.add_row(HOSTILE.replace("[", "("), style="bold")
    table.add_row(cell(HOSTILE))
    screen.print(table)
    with Progress(console=screen) as progress:
        progress.add_task(HOSTILE.replace("[", "("), total=1)
    sent = screen.file.getvalue()
    ours = re.sub("\x1b\\[[0-9;?]*[A-Za-z]|\r", "", sent)
    assert "\x1b[31m" in sent
    assert ORDERS.findall(ours) == []
    assert r"\u202e" in ours


def test_every_command_prints_through_the_screen() -> None:
    package = Path(main.__file__).parents[1]
    shared = [package / "lab/start_notes.py", package / "lab/compare/execute.py"]
    sources = [*shared, *sorted((package / "cli").glob("*.py"))]
    made = [s.name for s in sources if re.search(r"(?<![\w.])(Console|print)\(", s.read_text())]
    assert made == ["main.py"]  # it shows tracebacks
