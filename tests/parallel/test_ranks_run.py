"""Runs on several ranks: the numbers of one rank, resumed on any number, ended by any failure."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from covey.cli.main import run as covey
from covey.embedded import CHECKPOINT
from covey.records.folder import RunFolder
from tests.parallel.ranks import codes_of, environment, free_port, start_ranks
from tests.processes import wait_until

SMALL = [
    "model.device=cpu", "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_tokens=24",
    "train.micro_batch_tokens=300", "train.mini_batches=2", "evaluate.every=0", "save.every=1",
    "save.keep=50", "optimizer.learning_rate=1e-5",
]  # fmt: skip
LEFT_OUT = re.compile("time/|engine/|other/packed_ratio")


def words(*settings: str) -> list[str]:
    return [word for setting in (*SMALL, *settings) for word in ("--set", setting)]


def trained(size: int, arguments: list[str], logs: Path, codes: list[int] | None = None) -> None:
    """Run `covey train` on several ranks, which must end with the given exit codes."""
    ranks = start_ranks(size, lambda rank: covey(["train", *arguments]), logs)
    found = codes_of(ranks)
    assert found == (codes or [0] * size), said(logs)


def said(logs: Path) -> str:
    return "".join(file.read_text() for file in sorted(logs.glob("*.log")))


def rows(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of each step, without times, and without those of an engine's copy."""
    kept = RunFolder.open(folder).steps()
    return [
        {k: v for k, v in row.items() if isinstance(v, (int, float)) and not LEFT_OUT.match(k)}
        for row in kept
    ]


def assert_same_curves(found: Path, wanted: Path, most: float) -> None:
    assert len(rows(found)) == len(rows(wanted)) > 0
    for mine, theirs in zip(rows(found), rows(wanted), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            close = math.isclose(mine[name], value, rel_tol=most, abs_tol=most)
            assert close, (theirs["step"], name, mine[name], value)


def test_eight_steps_on_one_and_two_ranks(tmp_path: Path) -> None:
    settings = words(
        "train.steps=8", "filter.dynamic_sampling=true", "filter.max_rounds=2",
        "task.min_operations=1", "task.max_operations=1", "objective.beta=0.05", "save.every=0",
    )  # fmt: skip
    one = tmp_path / "one"
    assert covey(["train", *settings, "--run", str(one)]) == 0
    assert all(row["optim/grad_norm"] > 0 for row in rows(one))
    assert max(row["rollout/rounds"] for row in rows(one)) == 2
    for strategy in ("ddp", "fsdp"):
        two = tmp_path / strategy
        parallel = ["--set", f"parallel.strategy={strategy}"]
        trained(2, [*settings, *parallel, "--run", str(two)], tmp_path / f"{strategy} logs")
        for mine, theirs in zip(*(RunFolder.open(f).rollouts(1) for f in (one, two)), strict=True):
            # The engine works on half as many rows at once, which rounds logits in their last bits.
            logps = zip(mine.pop("sampler_logp"), theirs.pop("sampler_logp"), strict=True)
            assert max(abs(a - b) for a, b in logps) < 2e-5
            assert mine == theirs
        assert_same_curves(two, one, 1e-4)


def resumed(run: Path, name: str, size: int, step: int, strategy: str = "") -> Path:
    """Resume a copy of a run after a step."""
    copy = run.parent / name
    shutil.copytree(run, copy)
    if strategy:
        config = (copy / "config.toml").read_text()
        assert config.count('strategy = "') == 1
        before, _, after = config.partition('strategy = "')
        (copy / "config.toml").write_text(
            f'{before}strategy = "{strategy}"{after[after.index(chr(34)) + 1 :]}'
        )
    arguments = ["--resume", str(copy), "--step", str(step)]
    trained(size, arguments, run.parent / f"{name} logs")
    return copy


def test_checkpoints_resume_on_any_number_of_ranks(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    settings = words("train.steps=3", "parallel.strategy=fsdp")
    trained(2, [*settings, "--run", str(whole)], tmp_path / "logs")
    saved = whole / "checkpoints" / "000002"
    assert (saved / "state" / ".metadata").is_file()
    assert (saved / "model.safetensors").is_file()
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    one = resumed(whole, "one", 1, 2)
    plain = resumed(whole, "plain", 1, 1, "ddp")  # saves whole optimizer states again
    assert not (plain / "checkpoints" / "000002" / "state").exists()
    four, back = resumed(whole, "four", 4, 2), resumed(plain, "back", 2, 2, "fsdp")
    for folder in (one, plain, four, back):
        assert_same_curves(folder, whole, 2e-5)
        for mine, theirs in zip(rows(folder), rows(whole), strict=True):
            for name in ("loss/policy_avg", "objective/scores"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", ["moving", "renewed"])
def test_hybrid_shards_with_a_compact_state_and_a_reference_that_moves(
    kind: str, tmp_path: Path
) -> None:
    alone, hybrid = tmp_path / "alone", tmp_path / "hybrid"
    settings = words(
        "train.steps=3", "optimizer.state=compact", f"reference.kind={kind}", "reference.every=1",
        "objective.beta=0.05",
    )  # fmt: skip
    assert covey(["train", *settings, "--run", str(alone)]) == 0
    more = ["--set", "parallel.strategy=fsdp", "--set", "parallel.shard_ranks=2"]
    trained(4, [*settings, *more, "--run", str(hybrid)], tmp_path / "logs")
    assert abs(rows(alone)[-1]["objective/kl"]) < 1e-5  # of the policy that sampled
    for folder in (
        hybrid,
        resumed(hybrid, "two", 2, 2),
        resumed(hybrid, "one", 1, 1, "ddp" if kind == "moving" else "fsdp"),
        resumed(alone, "four", 4, 1, "fsdp"),
    ):
        assert_same_curves(folder, alone, 2e-5)
        for mine, theirs in zip(rows(folder), rows(alone), strict=True):
            assert mine["loss/policy_avg"] == pytest.approx(
                theirs["loss/policy_avg"], rel=1e-6, abs=1e-6
            )


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 0)])
def test_a_killed_rank_ends_all_and_the_run_resumes(size: int, victim: int, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = words("train.steps=6")
    trained(size, [*settings, "--run", str(whole)], tmp_path / "whole logs")
    logs = tmp_path / "logs"
    arguments = ["train", *settings, "--run", str(killed)]
    ranks = start_ranks(size, lambda rank: covey(arguments), logs)
    wait_until(lambda: (killed / "checkpoints" / "000002").exists())
    os.kill(ranks[victim], signal.SIGKILL)
    struck = time.monotonic()
    codes = codes_of(ranks, 30.0)
    assert time.monotonic() - struck < 30.0
    assert codes[victim] == 137
    assert all(code == 1 for rank, code in enumerate(codes) if rank != victim)
    assert said(logs).count(f"rank {victim} is gone") == 1, said(logs)
    trained(size, ["--resume", str(killed)], tmp_path / "resumed logs")
    assert rows(killed) == rows(whole)


def test_a_signal_to_one_rank_saves_and_ends_all(tmp_path: Path) -> None:
    run, logs = tmp_path / "run", tmp_path / "logs"
    arguments = ["train", *words("train.steps=500", "save.every=0"), "--run", str(run)]
    ranks = start_ranks(2, lambda rank: covey(arguments), logs)
    wait_until(lambda: len(rows(run)) > 1 if (run / "steps.jsonl").exists() else False)
    os.kill(ranks[1], signal.SIGINT)
    os.kill(ranks[1], signal.SIGINT)  # a launcher sends it again
    assert codes_of(ranks) == [130, 130], said(logs)
    saved = RunFolder.open(run).checkpoints()
    assert [step for step, _ in saved] == [len(rows(run))]
    assert "--resume" in said(logs)


def one_line(logs: Path) -> str:
    """Return what all ranks have said as errors, which must be one line."""
    lines = [line for line in said(logs).splitlines() if line.startswith("covey: ")]
    assert len(lines) == 1, said(logs)
    assert "Traceback" not in said(logs)
    return lines[0]


def test_another_config_on_one_rank_is_one_line(tmp_path: Path) -> None:
    def work(rank: int) -> int:
        return covey(["train", *words(f"train.steps={2 + rank}"), "--run", str(tmp_path / "run")])

    assert codes_of(start_ranks(2, work, tmp_path / "logs")) == [2, 2]
    line = one_line(tmp_path / "logs")
    assert "rank 1 and rank 0 have different settings: train.steps is 3, and 2 on rank 0" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("damaged", "text"),
    [
        ("config.json", "model is not a model: it has no config.json"),
        ("model.safetensors", "cannot load"),
    ],
    ids=["before ranks join", "after they have joined"],
)
def test_a_failure_on_one_rank_ends_all_with_its_line(
    damaged: str, text: str, tmp_path: Path
) -> None:
    for rank in ("0", "1"):
        shutil.copytree(CHECKPOINT, tmp_path / rank / "model")
    (tmp_path / "1" / "model" / damaged).unlink()

    def work(rank: int) -> int:
        os.chdir(tmp_path / str(rank))
        settings = words("train.steps=1", "model.path=./model")
        return covey(["train", *settings, "--run", str(tmp_path / "run")])

    codes = codes_of(start_ranks(2, work, tmp_path / "logs"))
    assert codes == [codes[0]] * 2 != [0, 0]
    line = one_line(tmp_path / "logs")
    assert line.startswith("covey: rank 1: model: ")
    assert text in line


def test_a_missing_rank_is_one_line(tmp_path: Path) -> None:
    def work(rank: int) -> int:
        os.environ.update(environment(0, 2, free_port()))
        arguments = words("train.steps=1", "parallel.timeout=1.5")
        return covey(["train", *arguments, "--run", str(tmp_path / "run")])

    assert codes_of(start_ranks(1, work, tmp_path / "logs")) == [1]
    line = one_line(tmp_path / "logs")
    assert "1 of 2 ranks started within 1.5 seconds; rank 1 is missing" in line


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"RANK": "2"}, "RANK = 2 must be less than WORLD_SIZE = 2"),
        ({"RANK": "one"}, "RANK = 'one' is not a number"),
        ({"WORLD_SIZE": ""}, "RANK is set, but WORLD_SIZE is not"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
    ],
)
def test_a_wrong_world_is_one_line(
    wrong: dict[str, str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in {**environment(0, 2, free_port()), **wrong}.items():
        monkeypatch.setenv(name, value)
    assert covey(["train", *words("train.steps=1"), "--run", str(tmp_path / "run")]) == 2
    error = capfd.readouterr().err
    assert text in error
    assert len(error.strip().splitlines()) == 1
