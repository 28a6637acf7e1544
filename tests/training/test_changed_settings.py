"""A resumed run may have other settings, if the steps before stay what they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from covey.cli.main import run as covey
from covey.config import Config, load_config
from covey.errors import ConfigError
from covey.lab.verify import recomputed
from covey.records.folder import RunFolder
from covey.start import FIXED, resumed_config

SETTINGS = (
    "model.device=cpu", "rollout.prompts_per_step=2", "rollout.group_size=4", "evaluate.every=0",
    "rollout.max_tokens=40", "optimizer.schedule=constant",
)  # fmt: skip


def trained(path: Path, *settings: str) -> Path:
    words = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    assert covey(["train", "--run", str(path), *words]) == 0
    return path


def steps_of(path: Path) -> list[dict[str, object]]:
    rows = RunFolder(path).steps()
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("short") / "run", "train.steps=2")


def test_a_finished_run_goes_on_as_the_longer_run(
    short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(tmp_path / "whole", "train.steps=4")
    resume = ["train", "--resume", str(short), "--set"]
    assert covey([*resume, "train.steps=1"]) == 2
    assert "already at step 2" in capsys.readouterr().err
    assert covey([*resume, "train.steps=4", "--set", "save.keep=1"]) == 0
    said = capsys.readouterr().out
    assert "train.steps = 4 (was 2)" in said
    assert "edited" not in said
    assert steps_of(short) == steps_of(whole)
    ends = [load_file(p / "checkpoints/000004/model.safetensors") for p in (short, whole)]
    assert all(ends[0][name].equal(ends[1][name]) for name in ends[1])
    assert load_config(str(short / "config.toml")).train.steps == 4
    changes = [json.loads(line) for line in (short / "changes.jsonl").read_text().splitlines()]
    settings = {"save.keep": [2, 1], "train.steps": [2, 4]}
    facts = {"reference": None, "exact_logp": True}
    assert changes == [{"step": 2, "settings": settings, **facts}]


def resumed(path: Path, *settings: str) -> list[float]:
    """Resume a run with other settings, and return the beta of each of its steps."""
    words = [word for setting in settings for word in ("--set", setting)]
    assert covey(["train", "--resume", str(path), *words]) == 0
    return [row["objective/beta"] for row in RunFolder(path).steps()]


def test_a_changed_beta_is_used(tmp_path: Path) -> None:
    path = trained(tmp_path / "run", "train.steps=1", "objective.beta=0.05", "save.every=1")
    assert resumed(path, "train.steps=2", "objective.beta=0.5") == [0.05, 0.5]
    adaptive = ["objective.beta=0.4", "objective.kl_target=1e-3", "objective.kl_horizon=100"]
    *_, first, second = resumed(path, "train.steps=4", *adaptive)
    assert first == 0.4
    assert second != 0.4
    assert resumed(path, "train.steps=5")[-1] not in (0.4, second)  # adapted further
    assert resumed(path, "train.steps=6", "objective.beta=0.2")[-1] == 0.2
    assert resumed(path, "train.steps=7", "objective.beta=0.3")[-1] == 0.3
    # The setting stays, even if the run is resumed from a checkpoint before the change.
    assert covey(["train", "--resume", str(path), "--step", "6"]) == 0
    assert RunFolder(path).steps()[-1]["objective/beta"] == 0.3


def test_steps_before_and_after_a_changed_beta_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["train.steps=2", "objective.beta=0.05", "save.every=1", "save.keep=9"]
    path = trained(tmp_path / "run", *given, "optimizer.learning_rate=1e-3")
    run = RunFolder(path)
    for step, beta in ((3, 0.0), (4, 0.5)):
        words = ["--set", f"train.steps={step}", "--set", f"objective.beta={beta}"]
        assert covey(["train", "--resume", str(path), *words]) == 0
        assert recomputed(run).passed  # to the bit
        for known in range(1, step + 1):
            capsys.readouterr()
            words = ["--exact", "--json"] if known < 3 else ["--json"]
            assert covey(["explain", str(path), "--step", str(known), *words]) == 0
            assert json.loads(capsys.readouterr().out)["exact"]
    assert [row.get("objective/beta") for row in run.steps()] == [0.05, 0.05, None, 0.5]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("seed=1", "random numbers"),
        ("model.path=smollm2", "checkpoint"),
        ("adapter.rank=4", "adapter"),
        ("task.max_operations=1", "other prompts"),
        ("rollout.prompts_per_step=4", "other prompts"),
        ("reward.name=math_answer", "compared"),
        ("objective.name=dapo", "one algorithm"),
        ("optimizer.state=compact", "state"),
        ("reference.kind=moving", "reference"),
    ],
)
def test_what_may_not_change_says_why(short: Path, override: str, why: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"cannot change {override.split('=')[0].split('.')[0]}.*{why}"
    ):
        resumed_config(RunFolder(short), [override])


def test_a_run_of_epochs_is_made_longer_by_epochs(tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"What is {i} + 1?", "target": str(i + 1)} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"task.{name}={data}" for name in ("train_file", "held_out_file")]
    path = trained(
        tmp_path / "run", "task.name=jsonl", *files, "train.stop_after={epochs=0.5}",
        "rollout.max_tokens=4", "reward.name=math_answer",
    )  # fmt: skip
    assert len(steps_of(path)) == 2
    with pytest.raises(ConfigError, match=r"cannot change train\.steps, .*epochs = 0\.5"):
        resumed_config(RunFolder(path), ["train.steps=3"])
    words = ["--set", "train.stop_after={epochs=0.75}"]
    assert covey(["train", "--resume", str(path), *words]) == 0
    assert len(steps_of(path)) == 3
    assert load_config(str(path / "config.toml")).train.steps == 3


def test_every_fixed_setting_exists() -> None:
    for key in FIXED:
        section, _, name = key.partition(".")
        field = Config.model_fields[section]
        assert not name or name in type(field.default).model_fields


def test_other_arguments_are_refused(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert covey(["train", "arithmetic", "--resume", str(short)]) == 2
    assert "--set" in capsys.readouterr().err
