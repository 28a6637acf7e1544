from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from covey.cli.main import run
from covey.embedded import CHECKPOINT
from covey.tasks.arithmetic import Arithmetic

SMALL = ("--set", "evaluate.prompts=24", "--set", "model.device=cpu")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model a little beside itself, so that some answers change and most do not."""
    path = tmp_path_factory.mktemp("models") / "other"
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.08)
    model.save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(CHECKPOINT).save_pretrained(path)
    return path


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["eval", *arguments, *SMALL, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_items_categories_and_numbers_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "items.jsonl"
    result = evaluated(
        capsys, "embedded", "--samples", "4", "--by", "operations", "--out", str(out)
    )
    items = [json.loads(line) for line in out.read_text().splitlines()]
    prompts = Arithmetic(min_operations=2, max_operations=3).held_out()[:24]
    assert [i["prompt_id"] for i in items] == [p.id for p in prompts]
    assert [i["target"] for i in items] == [p.target for p in prompts]
    for i in items:
        assert i["success"] == i["completion"].endswith(f"<answer>{i['target']}</answer>")
        assert len(i["samples"]) == 4
    for name in ("greedy", "mean@4", "pass@2", "pass@4"):
        values = [i["values"][name] for i in items]
        assert result[name]["value"] == pytest.approx(sum(values) / 24)
    by = result["by"]
    assert list(by) == ["2", "3"]
    for key, row in by.items():
        of = [i["values"] for i in items if i["info"]["operations"] == int(key)]
        assert row["prompts"] == len(of)
        assert row["mean@4"]["value"] == pytest.approx(sum(v["mean@4"] for v in of) / len(of))
        assert row["greedy"]["low"] <= row["greedy"]["value"] <= row["greedy"]["high"]


def test_two_models_are_compared_on_the_same_prompts(
    other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "items.jsonl"
    result = evaluated(capsys, "embedded", "--against", str(other), "--out", str(out))
    items = [json.loads(line) for line in out.read_text().splitlines()]
    right = {
        model: {i["prompt_id"] for i in items if i["model"] == model and i["success"]}
        for model in ("embedded", str(other))
    }
    first, second = right["embedded"], right[str(other)]
    assert first != second
    difference = result["difference"]
    assert set(difference["gained"]) == first - second
    assert set(difference["lost"]) == second - first
    assert difference["greedy"]["value"] == pytest.approx((len(first) - len(second)) / 24)
    assert difference["greedy"]["gained"] == len(first - second)
    assert result["against"]["model"] == str(other)
    assert result["against"]["greedy"]["value"] == pytest.approx(len(second) / 24)


def test_a_person_reads_tables(other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", "embedded", "--by", "carries", "--against", str(other), *SMALL]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.count("carries") == 2
    assert "[" in shown.split("carries")[1]  # rich has not taken intervals for markup
    assert "first - second" in shown
    assert f"{other}: greedy" in shown.replace("\n", "")
    assert "gained" in shown
    assert "lost" in shown


def test_any_task_can_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"{n}+5?", "answer": str(n + 5), "kind": ["odd", "even"][n % 2 == 0]}
            for n in range(10, 16)]  # fmt: skip
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [f"task.{split}_file='{tmp_path}/sums.jsonl'" for split in ("train", "held_out")]
    task = [word for setting in ("task.name=jsonl", *files) for word in ("--set", setting)]
    result = evaluated(capsys, "embedded", *task, "--by", "kind")
    assert {name: row["prompts"] for name, row in result["by"].items()} == {"even": 3, "odd": 3}


@pytest.mark.parametrize(
    ("flags", "samples"), [([], 3), (["--samples", "2"], 2), (["--samples", "0"], None)]
)
def test_without_a_flag_as_many_are_sampled_as_the_settings_say(
    flags: list[str], samples: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--set", "evaluate.samples=3", "--set", "rollout.max_tokens=8"]
    result = evaluated(capsys, "embedded", *few, *flags)
    means = [name for name in result if name.startswith("mean@")]
    assert means == ([] if samples is None else [f"mean@{samples}"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--by", "operatoins"],
            "--by operatoins: no prompt has this key in its `info` field; did you mean 'op",
        ),
        (
            ["--out", "nowhere/at/all.jsonl"],
            "--out nowhere/at/all.jsonl: the folder nowhere/at does not exist",
        ),
        (["--against", "no/such/model"], "model: cannot load 'no/such/model'"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["eval", "embedded", *SMALL, *arguments]) != 0
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1]
