from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import transformers

from covey.cli.main import run
from covey.config import load_config
from covey.embedded import CHECKPOINT

QUICK = (
    "train.steps=2", "rollout.prompts_per_step=2", "rollout.group_size=2", "evaluate.every=1",
    "evaluate.prompts=8", "evaluate.samples=4",
)  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "quick"
    overrides = [word for setting in QUICK for word in ("--set", setting)]
    assert run(["train", "--run", str(path), *overrides]) == 0
    return path


def test_print_config_round_trips(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        run(["train", "--set", "seed=7", "--set", "rollout.stop=['a\"b', 'c']", "--print-config"])
        == 0
    )
    first = capsys.readouterr().out
    (tmp_path / "again.toml").write_text(first)
    assert run(["train", "again.toml", "--print-config"]) == 0
    assert capsys.readouterr().out == first
    config = load_config("again.toml")
    assert config.seed == 7
    assert config.rollout.stop == ['a"b', "c"]
    assert config.objective.options["ddof"] == 1  # defaults are written out
    assert [p.name for p in tmp_path.iterdir()] == ["again.toml"]


def test_a_run_folder_holds_all_that_the_run_was(finished: Path) -> None:
    assert load_config(str(finished / "config.toml")).train.steps == 2
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["seed"] == 0
    steps = read(finished / "steps.jsonl")
    assert [s["step"] for s in steps] == [1, 2]
    assert [s["episode"] for s in steps] == [4, 8]
    rollouts = read(finished / "rollouts/000002.jsonl")
    assert len(rollouts) == 4
    assert list(rollouts[0])[:4] == ["prompt", "target", "text", "reward"]
    rewards = [row["reward"] for row in rollouts]
    assert steps[1]["objective/scores"] == pytest.approx(sum(rewards) / 4)
    evaluations = read(finished / "eval.jsonl")
    assert [e["step"] for e in evaluations] == [0, 1, 2]
    for e in evaluations:
        assert e["greedy"]["low"] <= e["greedy"]["value"] <= e["greedy"]["high"]
        assert e["mean@4"]["value"] <= e["pass@2"]["value"] <= e["pass@4"]["value"]


def test_checkpoints_are_ordinary_models(finished: Path) -> None:
    folder = finished / "checkpoints/000002"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == 460_160
    # Nothing in the files asks for covey's own attention, which only covey can give.
    assert "covey" not in (folder / "config.json").read_text()
    assert tokenizer.decode(tokenizer.encode("<think>1+1=2</think>")) == "<think>1+1=2</think>"


def test_eval_measures_a_run_as_its_own_training_did(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = json.loads((finished / "eval.jsonl").read_text().splitlines()[-1])
    assert run(["eval", str(finished), "--json", "--samples", "4"]) == 0
    row = json.loads(capsys.readouterr().out)
    for name in ("greedy", "mean@4", "pass@4"):
        assert row[name] == last[name]
    assert row["model"].endswith("checkpoints/000002")
    assert run(["eval", str(finished / "checkpoints/000002"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["greedy"] == last["greedy"]
    assert run(["eval", str(finished)]) == 0
    assert "sampling: one token at a time" in capsys.readouterr().err


def test_runs_lists_and_shows(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", str(finished.parent), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["steps"], row["checkpoint"]) == (2, 2)
    assert run(["runs", str(finished), "--step", "1"]) == 0
    shown = capsys.readouterr().out
    rollouts = read(finished / "rollouts/000001.jsonl")
    assert shown.count("reward") == len(rollouts)
    assert all(row["prompt"] in shown for row in rollouts)
    assert run(["runs", str(finished), "--step", "9"]) == 1


def test_help_and_the_list_of_algorithms_need_no_torch() -> None:
    code = "import sys; from covey.cli.main import run; run(sys.argv[1:]); assert 'torch' not in sys.modules"
    for arguments in (["--help"], ["train", "--help"], ["--version"], ["algorithms"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
        )
        assert "covey" in done.stdout


def test_a_small_dataset_is_asked_epoch_after_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"question": f"{n}+5?", "answer": str(n + 5)}) for n in range(10, 17)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    task = [f"task.{split}_file='{tmp_path}/sums.jsonl'" for split in ("train", "held_out")]
    settings = [
        "task.name=jsonl",
        *task,
        "train.steps=9",
        "rollout.prompts_per_step=3",
        "evaluate.every=0",
    ]
    overrides = [word for setting in settings for word in ("--set", setting)]
    assert run(["train", "--run", str(tmp_path / "run"), *overrides]) == 0
    assert "sampling: one token at a time\n" in capsys.readouterr().out
    asked = [
        sorted({row["prompt"] for row in read(tmp_path / f"run/rollouts/{step:06d}.jsonl")})
        for step in range(1, 10)
    ]
    assert all(len(prompts) == 3 for prompts in asked)
    assert len({prompt for prompts in asked for prompt in prompts}) == 7


def test_another_task_or_model_has_defaults_instead_of_the_toy_recipes_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def printed(*words: str) -> tuple[dict[str, Any], str]:
        assert run(["train", *words, "--print-config"]) == 0
        shown = capsys.readouterr()
        return tomllib.loads(shown.out), shown.err

    toy, said = printed()
    assert (toy["optimizer"]["learning_rate"], said) == (1e-4, "")
    for words in (["--set", "task.name=countdown"], ["--model", str(CHECKPOINT)]):
        config, said = printed(*words)
        assert config["optimizer"]["learning_rate"] == 1e-6
        assert config["rollout"]["max_tokens"] == 64
        assert "other settings have their defaults" in said
