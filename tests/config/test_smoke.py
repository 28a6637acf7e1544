"""`--smoke` shrinks any recipe and reports what it replaces."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from covey.cli.main import run
from covey.config import Config, load_config, load_smoke, recipe_names
from covey.config.resolve import resolve, task_of
from covey.config.schema import StopAfter
from covey.config.smoke import ALWAYS, AT_MOST, FACTS, WORD_PROBLEMS, changed_by_smoke


@pytest.mark.parametrize("name", recipe_names())
def test_no_setting_exceeds_its_cap_and_none_grows(name: str) -> None:
    before, small = load_config(name), load_smoke(name, ["model.path=any"])[0]
    for key, cap in AT_MOST.items():
        section, setting = key.split(".")
        old, new = getattr(getattr(before, section), setting), getattr(getattr(small, section), setting)  # fmt: skip
        assert new == (
            cap
            if old == 0 and key in [key for key, facts in FACTS.items() if facts.zero_is_many]
            else min(old, cap)
        ), key
    for key, value in ALWAYS.items():
        section, setting = key.split(".")
        found = getattr(getattr(small, section), setting)
        assert found == (StopAfter() if key == "train.stop_after" else value)
    assert small.objective == before.objective
    assert small.optimizer.learning_rate == before.optimizer.learning_rate
    assert small.reference == before.reference


def test_overrides_come_after(tmp_path: Path) -> None:
    settings = ["train.steps=5", "rollout.max_tokens=100", "objective.name=dapo"]
    config, _ = load_smoke("simple-grpo", [*settings, "model.path=any"])
    assert (config.train.steps, config.rollout.max_tokens) == (5, 100)
    assert config.objective.name == "dapo"
    assert config.rollout.prompts_per_step == AT_MOST["rollout.prompts_per_step"]


def test_the_settings_that_smoke_changes_are_known() -> None:
    changed = changed_by_smoke("arithmetic", ["evaluate.prompts=9", "rollout.group_size=3"])
    assert {"train.steps", "rollout.prompts_per_step", "scoring.workers"} <= changed
    assert not {"evaluate.prompts", "rollout.group_size", "train.stop_after"} & changed


@pytest.mark.parametrize(
    ("own", "reported"),
    [
        ([], 0),
        (["evaluate.prompts=9"], 1),
        (["evaluate.prompts=9", "rollout.max_tokens=9", "scoring.workers=2"], 3),
    ],
)
def test_settings_changed_by_smoke_are_not_reported(
    own: list[str], reported: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = [word for setting in own for word in ("--set", setting)]
    assert run(["train", "--smoke", "--run", str(tmp_path / "run"), *settings]) == 0
    lines = "".join(capfd.readouterr()).splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("sampling: "))
    end = next(n for n, line in enumerate(lines) if line.startswith("training: "))
    assert end - begin - 1 == reported, lines


def test_a_budget_of_tokens_does_not_outlast_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nsteps = 200\nstop_after = {tokens = 50_000_000}\n")
    train = load_smoke(str(file))[0].train
    assert (train.steps, train.budget, train.amount) == (2, "steps", 2)


def test_smaller_sizes_stay_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[rollout]\ngroup_size = 2\nmax_tokens = 9\n[train]\nsteps = 1\n")
    config, [note] = load_smoke(str(file))
    assert (config.rollout.group_size, config.rollout.max_tokens, config.train.steps) == (2, 9, 1)
    assert "1 steps of 2 x 2 completions of up to 9 tokens" in note


@pytest.mark.parametrize("name", ["zhangfaen-grpo", "open-instruct-tulu3-8b"])
def test_hub_datasets_are_replaced_by_packaged_problems(name: str) -> None:
    config, notes = load_smoke(name, ["model.path=any"])
    assert any("word problems that come with covey" in note for note in notes)
    options = load_config(name).task.options
    task = task_of(resolve(config))
    train, held_out = task.train(), task.held_out()
    assert (len(train), len(held_out)) == (16, 8)
    texts = Counter(p.messages[-1]["content"] for p in [*train, *held_out])
    assert set(texts.values()) == {1}
    for prompt in train:
        assert float(prompt.target) == int(prompt.target)
        # An instruction that the recipe does not give is not added.
        assert prompt.messages[-1]["content"].endswith(("?", options.get("instruction") or "?"))
        assert (prompt.messages[0]["role"] == "system") == bool(options.get("system"))


def test_files_of_the_user_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "[model]\npath = 'any'\n[task]\nname = 'gsm8k'\ntrain_file = 'a'\nheld_out_file = 'b'\n"
    )
    config, notes = load_smoke(str(file))
    assert config.task.options == {"train_file": "a", "held_out_file": "b"}
    assert len(notes) == 1


def test_the_embedded_model_gets_arithmetic() -> None:
    config, notes = load_smoke("nano-aha", ["model.path=embedded"])
    assert (config.task.name, config.reward.name) == ("arithmetic", "think_answer")
    assert (config.model.template, config.model.prefill, config.rollout.stop) == ("auto", "", [])
    assert any("task countdown and reward nano_aha" in note for note in notes)
    assert load_smoke("arithmetic")[0].task == load_config("arithmetic").task


def test_print_config_shows_what_smoke_makes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["train", "simple-grpo", "--smoke", "--set", "train.steps=3", "--print-config"]
    assert run(arguments) == 0
    shown = capsys.readouterr()
    (tmp_path / "small.toml").write_text(shown.out)
    config = load_config(str(tmp_path / "small.toml"))
    assert (config.train.steps, config.rollout.group_size) == (3, 4)
    assert config.task.options["train_file"] == WORD_PROBLEMS["train_file"]
    assert shown.err.startswith("smoke: ")
    assert run(["train", "--resume", str(tmp_path), "--smoke"]) == 2


def test_sft_and_eval_have_smoke_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    arguments = ["--model", "embedded", "--smoke", "--run", str(folder)]
    assert run(["sft", "lm-book", *arguments]) == 0
    assert len((folder / "steps.jsonl").read_text().splitlines()) == 2
    assert run(["eval", str(folder), "--smoke", "--json"]) == 0
    assert '"prompts": 8' in capsys.readouterr().out


def test_every_number_of_a_step_has_a_limit_in_smoke_runs() -> None:
    """A new setting that multiplies the work of a step must say its limit at its field."""
    work = {"prompts_per_step", "group_size", "max_tokens", "mini_batches", "epochs", "solutions"}
    sections = ("rollout", "train", "sft")
    fields = {f"{s}.{n}" for s in sections for n in type(getattr(Config(), s)).model_fields}
    counted = {name for name in fields if name.split(".")[1] in work} - {
        "sft.max_tokens",
        "sft.epochs",
    }
    assert counted <= AT_MOST.keys()
