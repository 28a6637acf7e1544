"""The documentation says what the code does."""

import contextlib
import inspect
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from covey.config import Config, load_config
from covey.config.algorithm_names import ALGORITHM_TITLES
from covey.config.other_names import OTHER_NAMES
from covey.config.resolve import objective_of, resolve, task_of
from covey.engines.native.sizes import WIDTHS
from covey.environments.registry import ENVIRONMENTS
from covey.evaluation.items import Item, ItemCompletion
from covey.objective import ALGORITHMS, build, find_algorithm
from covey.objective.build import PIECES
from covey.objective.correction import CORRECTIONS
from covey.objective.options import OPTIONS, options_of
from covey.objective.penalty import PENALTIES
from covey.records.health_checks import CHECKS
from covey.rewards.registry import REWARDS, make_reward
from covey.tasks.registry import TASKS
from covey.types import Prompt
from tools import algorithm_pages, metrics_page, settings_page

ROOT = Path(__file__).parent.parent
ALGORITHM_PAGES = ROOT / "docs/algorithms"


def test_the_metrics_page_is_generated_from_the_table() -> None:
    assert (ROOT / "docs/metrics.md").read_text().endswith(metrics_page.table())


def test_the_health_page_names_every_check() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/health.md").read_text(), re.MULTILINE)
    assert rows == list(CHECKS)


def test_the_configuration_example_loads(tmp_path: Path) -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    example = re.search(r"```toml\n(.*?)```", page, re.DOTALL).group(1)
    (tmp_path / "example.toml").write_text(example)
    config = load_config(str(tmp_path / "example.toml"))
    assert config.rollout.group_size == 8
    assert config.objective.options == {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.04}


def test_grpos_beta_has_one_default() -> None:
    default = resolve(load_config(None)).objective.options["beta"]
    assert build("grpo").beta == default == 0.04
    assert f"beta = {default}  " in (ROOT / "docs/configuration.md").read_text()
    assert f"{default}: `covey algorithms grpo`" in (ROOT / "docs/migrating.md").read_text()


def test_the_page_of_settings_is_generated_and_explains_each() -> None:
    # After a change: make docs.
    text = (ROOT / "docs/settings.md").read_text()
    assert text.endswith(settings_page.START + settings_page.page())
    rows = re.findall(r"^\| `([\w.]+)` \|(.*)\|$", text, re.MULTILINE)
    assert [key for key, rest in rows if not rest.split("|")[2].strip()] == []
    known = {f"{key}.{name}" for key, part in settings_page.sections(Config)
             for name in part.model_fields} | set(Config.model_fields)  # fmt: skip
    options = {f"objective.{name}" for name in (*OPTIONS, *PIECES)}
    assert set(OTHER_NAMES) <= known | options


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_page_of_an_algorithm_is_generated_from_it(name: str) -> None:
    # After a change: make docs.
    curves = algorithm_pages.curves_of(name, ALGORITHM_PAGES)
    assert (ALGORITHM_PAGES / f"{name}.md").read_text() == algorithm_pages.page(name, curves)


def test_no_page_is_of_an_algorithm_that_is_not_there() -> None:
    assert {path.stem for path in ALGORITHM_PAGES.iterdir()} == {"README", *ALGORITHMS}


def test_the_pages_give_the_number_of_algorithms_in_the_registry() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), ALGORITHM_PAGES / "README.md"]
    number = re.compile(r"\b(\d+|\w+ty(?:-\w+)?)\s+algorithms\b")
    found = {page: number.findall(page.read_text()) for page in pages}
    assert found[ROOT / "README.md"] != []
    assert {count for counts in found.values() for count in counts} == {str(len(ALGORITHMS))}


def test_the_index_of_algorithms_is_generated_and_stands_there_once() -> None:
    text = (ALGORITHM_PAGES / "README.md").read_text()
    assert text.endswith("\n\n" + algorithm_pages.index())
    assert text.count("| name |") == 1


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("| piece | choices |", PIECES),
        ("| `kl` | value | gradient | expected gradient, on policy |", PENALTIES),
        ("| `correction` | factor of a token |", CORRECTIONS),
    ],
)
def test_the_tables_of_pieces_list_what_there_is(heading: str, names: Mapping[str, Any]) -> None:
    text = (ALGORITHM_PAGES / "README.md").read_text()
    assert text.count(heading) == 1
    rows = text.partition(heading)[2].partition("\n\n")[0].split("\n")[2:]
    cells = {row.split("|")[1].strip(" `"): row.split("|")[2] for row in rows}
    assert list(cells) == list(names)
    if names is PIECES:
        choices = {kind: re.findall(r"`(\w+)`", text) for kind, text in cells.items()}
        assert choices == {kind: list(pieces) for kind, pieces in PIECES.items()}


def test_the_configurations_of_the_algorithms_page_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ALGORITHM_PAGES / "README.md").read_text()
    pieces, own = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "pieces.toml").write_text(pieces)
    options = resolve(load_config(str(tmp_path / "pieces.toml"))).objective.options
    chosen = {kind: options[kind] for kind in PIECES}
    whole = options_of(find_algorithm("composed"))
    usual = {kind: whole[kind].default for kind in PIECES}
    assert chosen == {**usual, "advantage": "centered", "ratio": "sequence"}
    assert all(f"`{default}`" in text for default in usual.values())
    (tmp_path / "own.toml").write_text(own)
    module = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    (tmp_path / "my_algorithms.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    objective = objective_of(resolve(load_config("own.toml")))
    sys.modules.pop("my_algorithms")
    assert objective.advantage.keywords == {"strength": 0.5}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_says_where_it_comes_from_and_what_it_is(name: str) -> None:
    assert re.search(r"\barXiv \d{4}\.\d{5}\b", ALGORITHM_TITLES[name])
    assert algorithm_pages.page(name).split("\n")[2] == f"{ALGORITHM_TITLES[name]}."
    # The formula comes first, indented, or after one sentence.
    blocks = inspect.getdoc(ALGORITHMS[name]).split("\n\n")[:2]
    formula = next(block for block in blocks if block.startswith("    ")).split("\n")
    assert all(line.startswith("    ") for line in formula)
    assert [line for line in formula if re.match(r"    loss +=  ?-? ?", line)] != []
    assert f"```\n{textwrap.dedent(chr(10).join(formula))}\n```" in algorithm_pages.page(name)


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page}: {link}"


def test_links_to_sections_lead_to_headings() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for link, section in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            target = page.parent / link if link else page
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert section in map(anchor, headings), f"{page}: {link}#{section}"


def anchor(heading: str) -> str:
    """Return GitHub's name of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_the_page_of_rewards_names_every_reward_and_its_examples_load(tmp_path: Path) -> None:
    text = (ROOT / "docs/rewards.md").read_text()
    assert [name for name in REWARDS if f"`{name}`" not in text] == []
    (tmp_path / "my_rewards.py").write_text(
        re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    )
    for number, example in enumerate(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)):
        file = tmp_path / f"{number}.toml"
        file.write_text(example)
        with contextlib.chdir(tmp_path):
            config = resolve(load_config(str(file)))
            reward = make_reward(config.reward.name, config.reward.options)
        assert reward.bounds[0] < reward.bounds[1]
    assert number == 6


def test_the_weights_of_the_templates_are_those_of_the_page() -> None:
    text = (ROOT / "docs/rewards.md").read_text()
    for name in ("math", "agent", "retrieval"):
        row = re.search(rf"\| `{name}` \|(.*)\|\n", text).group(1)
        shown = [float(cell.split()[0]) for cell in row.split("|")]
        assert shown == list(REWARDS[name]().weights.values())


def test_the_page_of_tasks_names_every_task_and_its_examples_load(tmp_path: Path) -> None:
    text = (ROOT / "docs/tasks.md").read_text()
    assert [name for name in TASKS if f"`{name}" not in text] == []
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"problem": "1+1?", "solution": 2, "level": 1}\n')
    for number, example in enumerate(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)):
        (tmp_path / f"{number}.toml").write_text(example)
        with contextlib.chdir(tmp_path):
            prompts = task_of(resolve(load_config(f"{number}.toml"))).train()
            assert prompts[0].messages
    assert number == 1


def test_the_page_of_environments_names_every_environment_and_its_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs/environments.md").read_text()
    assert [name for name in ENVIRONMENTS if f"`{name}`" not in text] == []
    lock, by_hand, guess, shop = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(guess + shop, {})
    (tmp_path / "lock.py").write_text(lock)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COVEY_TRUST", "lock")
    exec(by_hand, {})
    printed = capsys.readouterr().out
    assert re.search(r"^tool: \d of 3 digits are correct\.$", printed, re.MULTILINE)
    assert "tool: error: a code has three digits\n" in printed
    assert printed.endswith("assistant: I give up.\nreward: {'environment': 0.0}\n")
    for number, example in enumerate(re.findall(r"```toml\n(.*?)```", text, re.DOTALL)):
        (tmp_path / f"{number}.toml").write_text(example)
        assert resolve(load_config(f"{number}.toml")).environment.name != "none"
    sys.modules.pop("lock")
    assert number == 4


def test_the_page_of_evaluation_names_every_field_of_a_line() -> None:
    text = (ROOT / "docs/evaluation.md").read_text()
    rows = text.partition("| field | meaning |")[2].partition("\n\n")[0].split("\n")[2:]
    cells = [re.findall(r"`(\w+)`", row) for row in rows]
    completion = ItemCompletion(text="4", success=True, reward=1.0, tokens=1, finish="stop")
    messages = ({"role": "user", "content": "2+2?"},)
    prompt = Prompt(id="1", task="sums", messages=messages, target="4")
    line = Item(prompt=prompt, greedy=completion, samples=(completion,)).row()
    assert {"model", *line, *asdict(completion)} == {name for cell in cells for name in cell}


def test_the_page_on_reading_names_files_that_exist() -> None:
    rows = re.findall(r"^\| .* \|$", (ROOT / "docs/reading.md").read_text(), re.MULTILINE)
    missing, count = [], 0
    for row in rows:
        folder = ROOT
        for name in re.findall(r"`([\w/]+(?:\.(?:py|toml|html|js)|/))`", row):
            path = ROOT / name if (ROOT / name).exists() else folder / name
            folder = path if name.endswith("/") else path.parent
            missing += [name] if not path.exists() else []
            count += 1
    assert missing == []
    assert count > 20


def test_the_page_on_memory_lists_the_numbers_of_slots() -> None:
    page = " ".join((ROOT / "docs/memory.md").read_text().split())
    *listed, last = WIDTHS
    assert f"{', '.join(map(str, listed))}, or a multiple of {last}" in page
