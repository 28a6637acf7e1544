"""The cost model beside everything that was measured on a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from covey.analysis.plan.cluster_table import table
from covey.analysis.plan.cost_model import (
    COUNTS,
    PUBLISHED,
    ModelSize,
    Workload,
    decode_seconds,
    engine_split,
    fewest_trainers,
    rollout_seconds,
    splits,
    update_seconds,
)

TOLERANCE = 0.2
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SECTIONS = json.loads((RESULTS / "speed-gpu.json").read_text())["sections"]
SHAPES = {
    "smollm2": ModelSize(parameters=134.5e6, layers=30, hidden=576, key_numbers=11_520),
    "qwen2.5": PUBLISHED["1.5B"],
    "7b": ModelSize(parameters=7.616e9, layers=28, hidden=3584, key_numbers=28_672),
}
# Measured again on another day with the same card: milliseconds of a decode step, tokens a second.
AGAIN = [
    ("smollm2", 128, 0.99, 108_910), ("smollm2", 512, 1.67, 268_850),
    ("smollm2", 1024, 2.64, 348_242), ("qwen2.5", 128, 2.07, 58_261),
    ("qwen2.5", 512, 4.28, 110_452), ("7b", 128, 5.34, 22_565), ("7b", 512, 13.57, 34_461),
]  # fmt: skip


def work(rows: int, prompt: int, completion: int, *, checkpointing: bool = False) -> Workload:
    return Workload(
        rows=rows, group=8, prompt=prompt, completion=completion, checkpointing=checkpointing
    )


def rows_of(section: str) -> list[dict[str, object]]:
    found = SECTIONS[section]["rows"]
    return [row for row in found if row.get("who", "covey") in ("covey", "grpo", "dr_grpo", "gspo")]


def cases() -> list[tuple[str, float, float]]:
    """What was measured, the model's seconds, and those measured."""
    found = []
    for row in rows_of("sampler"):
        size, count = SHAPES[row["shape"]], row["completions"]
        name = f"{row['shape']} x {count}"
        found.append((f"decode {name}", decode_seconds(size, count, 256), row["step_ms"] / 1e3))
        seconds = row["tokens"] / row["tokens_per_s"]
        found.append((f"call {name}", rollout_seconds(size, work(count, 128, 256)), seconds))
    for shape, count, ms, speed in AGAIN:
        size, name = SHAPES[shape], f"{shape} x {count} again"
        found.append((f"decode {name}", decode_seconds(size, count, 256), ms / 1e3))
        expected = rollout_seconds(size, work(count, 128, 256))
        found.append((f"call {name}", expected, count * 256 / speed))
    size = SHAPES["qwen2.5"]
    found.append(("decode long", decode_seconds(size, 128, 2560), 3.83e-3))
    found.append(("call long", rollout_seconds(size, work(128, 512, 4096)), 128 * 4096 / 32_809))
    for row in rows_of("linear"):
        expected = rollout_seconds(SHAPES[row["shape"]], work(row["completions"], 128, 256))
        found.append((f"call {row['completions']} rows", expected, row["seconds"]))
    return found + updates()


def updates() -> list[tuple[str, float, float]]:
    found = []
    for row in rows_of("update"):
        sizes = {"smollm2": (128, 128, 256), "qwen2.5": (32, 256, 768)}[row["shape"]]
        load = work(*sizes, checkpointing=row["checkpointing"])
        assert load.tokens == pytest.approx(row["packed"], rel=0.05)
        found.append(
            (f"update {row['ran']}", update_seconds(SHAPES[row["shape"]], load), row["seconds"])
        )
    (step,) = rows_of("step")
    found += [
        ("step rollout", rollout_seconds(SHAPES["smollm2"], work(128, 128, 256)), step["rollout"]),
        ("step update", update_seconds(SHAPES["smollm2"], work(128, 128, 256)), step["update"]),
    ]
    for row in rows_of("seed_shape"):
        load = replace(work(16, 128, 400), forwards=int(row["who"] == "grpo"))  # a reference
        found.append(
            (f"{row['who']} rollout", rollout_seconds(SHAPES["qwen2.5"], load), row["rollout"])
        )
    # Model flops are 6 x parameters + 6 x layers x hidden x context a token, over 989 TFLOP/s.
    for name, load, utilization in (
        ("7b", work(16, 256, 768, checkpointing=True), 0.571),
        ("qwen2.5", work(8, 0, 8192), 0.367),
    ):
        size = SHAPES[name]
        flops = 6 * size.parameters + 6 * size.layers * size.hidden * load.context
        seconds = load.rows * load.context * flops / (utilization * 989e12)
        found.append((f"update {name}", update_seconds(size, load), seconds))
    return found


CASES = cases()


@pytest.mark.parametrize(("name", "expected", "measured"), CASES, ids=[case[0] for case in CASES])
def test_every_measured_case_is_within_a_fifth(name: str, expected: float, measured: float) -> None:
    assert expected == pytest.approx(measured, rel=TOLERANCE), name


def test_all_measured_cases_are_there() -> None:
    assert len(CASES) >= 40
    kinds = {case[0].partition(" ")[0] for case in CASES}
    assert {"decode", "call", "update", "step"} <= kinds


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_best_split_of_a_cluster(size: str) -> None:
    model = PUBLISHED[size]
    load = Workload(rows=1024, group=16, prompt=256, completion=2048)
    before = float("inf")
    for gpus in COUNTS:
        found = splits(model, load, gpus)
        if not found:
            assert gpus < fewest_trainers(model) + engine_split(model)
            continue
        best = found[0]
        assert best.shared or best.trainers + best.engines * best.engine_gpus <= gpus
        assert best.trainers >= fewest_trainers(model)
        assert best.seconds <= before, "more GPUs are never slower"
        assert best.seconds <= min(split.seconds for split in found)
        before = best.seconds


def test_overlap_is_worth_at_most_a_factor_of_two() -> None:
    load = Workload(rows=1024, group=16, prompt=256, completion=2048)
    for model in PUBLISHED.values():
        in_turn, beside = (splits(model, load, 64, staleness=k)[0].seconds for k in (0, 1))
        assert 1.0 <= in_turn / beside <= 2.0


def test_the_table_of_the_page_is_what_the_model_says() -> None:
    page = (RESULTS.parents[1] / "docs" / "scale.md").read_text()
    load = Workload(rows=1024, group=16, prompt=256, completion=2048)
    for row in table(load):
        trainers = "the same" if row["shared"] else row["trainers"]
        seconds = [row[key] for key in ("rollout", "update", "sync", "seconds", "seconds_in_turn")]
        cells = [row["model"], row["gpus"], trainers, f"{row['engines']} x {row['engine_gpus']}"]
        line = " | ".join(str(cell) for cell in [*cells, *(f"{value:.1f}" for value in seconds)])
        assert f"| {line} |" in page
