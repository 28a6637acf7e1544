"""The cost model of generation and training on GPUs beside every measured case.

    python benchmarks/cost_model.py            # print the table
    python benchmarks/cost_model.py --write    # and write the tables of docs/scale.md
    python benchmarks/cost_model.py --fit      # print the constants that fit the measurements best

The exit code is 1 if a case is off by more than 20 %.

Cases on a GPU are whole calls of the engine, decode steps, updates and parts of training steps.
Cases on a CPU check how the model composes a step: their parts were measured on one core, and the
forecast is for two cores. Runs in which completions have unknown lengths are not cases.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cluster_model import (
    H200,
    PUBLISHED,
    Gpu,
    ModelSize,
    Split,
    Workload,
    decode_seconds,
    rollout_seconds,
    update_seconds,
)
from cluster_model import table as best_splits

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "scale.md"
TOLERANCE = 0.2
SHAPES = {
    "smollm2": ModelSize(parameters=134.5e6, layers=30, hidden=576, key_numbers=11_520),
    "qwen2.5": PUBLISHED["1.5B"],
    "7b": ModelSize(parameters=7.616e9, layers=28, hidden=3584, key_numbers=28_672),
}
OWN = ("covey", "grpo", "dr_grpo", "gspo")
"""The rows of speed-gpu.json that are not of a peer."""
# Measured on another day with the same kind of GPU: milliseconds of a decode step, tokens a second.
AGAIN = [
    ("smollm2", 128, 0.99, 108_910), ("smollm2", 512, 1.67, 268_850),
    ("smollm2", 1024, 2.64, 348_242), ("qwen2.5", 128, 2.07, 58_261),
    ("qwen2.5", 512, 4.28, 110_452), ("7b", 128, 5.34, 22_565), ("7b", 512, 13.57, 34_461),
]  # fmt: skip
FITTED = (
    "key_bandwidth", "train_flops", "layer_seconds", "row_seconds", "token_seconds", "recompute",
    "call_seconds", "prefill_flops",
)  # fmt: skip


class Case(NamedTuple):
    """A measured time, and the time by the model."""

    name: str
    where: str
    """Where it was measured."""
    model: float
    """Seconds by the cost model."""
    measured: float
    """Seconds that were measured."""

    @property
    def off(self) -> float:
        return self.model / self.measured - 1


@cache
def results(name: str) -> Any:
    """Return a results file, or an empty one."""
    file = HERE / "results" / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def work(rows: int, prompt: int, completion: int, *, checkpointing: bool = False) -> Workload:
    return Workload(
        rows=rows, group=8, prompt=prompt, completion=completion, checkpointing=checkpointing
    )


def speed_rows(section: str) -> list[Mapping[str, Any]]:
    found = results("speed-gpu")["sections"][section]["rows"]
    return [row for row in found if row.get("who", "covey") in OWN]


def generation(gpu: Gpu) -> Iterator[Case]:
    """Decode steps and calls of the engine."""
    again = "H200, another day"
    for row in speed_rows("sampler"):
        size, count = SHAPES[row["shape"]], row["completions"]
        name, seconds = f"{row['shape']}, {count} rows", row["tokens"] / row["tokens_per_s"]
        yield Case(
            f"decode step, {name}", "H200", decode_seconds(size, count, 256, gpu),
            row["step_ms"] / 1e3,
        )  # fmt: skip
        call = rollout_seconds(size, work(count, 128, 256), gpu)
        yield Case(f"call, {name}", "H200", call, seconds)
    for shape, count, ms, speed in AGAIN:
        size, name = SHAPES[shape], f"{shape}, {count} rows"
        yield Case(f"decode step, {name}", again, decode_seconds(size, count, 256, gpu), ms / 1e3)
        call = rollout_seconds(size, work(count, 128, 256), gpu)
        yield Case(f"call, {name}", again, call, count * 256 / speed)
    size, name = SHAPES["qwen2.5"], "qwen2.5, 128 rows, 512 + 4,096 tokens"
    yield Case(f"decode step, {name}", again, decode_seconds(size, 128, 2560, gpu), 3.83e-3)
    call = rollout_seconds(size, work(128, 512, 4096), gpu)
    yield Case(f"call, {name}", again, call, 128 * 4096 / 32_809)
    for row in speed_rows("linear"):
        call = rollout_seconds(SHAPES[row["shape"]], work(row["completions"], 128, 256), gpu)
        yield Case(
            f"call, {row['shape']}, {row['completions']} rows, batch scaling", "H200", call,
            row["seconds"],
        )  # fmt: skip


def updates(gpu: Gpu) -> Iterator[Case]:
    """Updates: forward and backward passes and the optimizer step."""
    for row in speed_rows("update"):
        if row["rank"]:
            continue  # the model has no LoRA
        sizes = {"smollm2": (128, 128, 256), "qwen2.5": (32, 256, 768)}[row["shape"]]
        load = work(*sizes, checkpointing=row["checkpointing"])
        assert math.isclose(load.tokens, row["packed"], rel_tol=0.05)
        recomputed = ", recomputed" if row["checkpointing"] else ""
        seconds = update_seconds(SHAPES[row["shape"]], load, gpu)
        name = f"update, {row['shape']}, {sizes[0]} x {sizes[1] + sizes[2]} tokens{recomputed}"
        yield Case(name, "H200", seconds, row["seconds"])
    for row in results("ranks-gpu")["settings"]["ranks"]["steps"]:
        seconds = update_seconds(SHAPES["qwen2.5"], work(32, 256, 768), gpu)
        for kind in ("graphs", "fused", "fsdp"):
            tokens = f"{row['micro_batch_tokens']:,} in a micro-batch"
            name = f"update, qwen2.5, 32 x 1024 tokens, {tokens}, {kind}"
            yield Case(name, "H200", seconds, row["seconds"][kind])
    # Model flops are 6 x parameters + 6 x layers x hidden x context a token, over 989 TFLOP/s.
    for shape, load, utilization in (
        ("7b", work(16, 256, 768, checkpointing=True), 0.571),
        ("qwen2.5", work(8, 0, 8192), 0.533),
    ):
        size = SHAPES[shape]
        flops = 6 * size.parameters + 6 * size.layers * size.hidden * load.context
        measured = load.rows * load.context * flops / (utilization * 989e12)
        yield Case(
            f"update, {shape}, {load.rows} x {load.context} tokens", "H200, another day",
            update_seconds(size, load, gpu), measured,
        )  # fmt: skip


def steps(gpu: Gpu) -> Iterator[Case]:
    """Training steps on one GPU, and their parts."""
    size, load = SHAPES["smollm2"], work(128, 128, 256)
    rollout, update = rollout_seconds(size, load, gpu), update_seconds(size, load, gpu)
    (step,) = speed_rows("step")
    yield Case("rollout of a step, smollm2, 128 rows", "H200", rollout, step["rollout"])
    yield Case("update of a step, smollm2, 128 rows", "H200", update, step["update"])
    yield Case("step, smollm2, 128 rows", "H200", rollout + update, step["seconds"])
    for row in speed_rows("seed_shape"):
        size = SHAPES["qwen2.5"]
        load = replace(work(16, 128, 400), forwards=int(row["who"] == "grpo"))  # a reference
        name = f"rollout of a step, qwen2.5, 16 rows of 400 tokens, {row['who']}"
        yield Case(name, "H200", rollout_seconds(size, load, gpu), row["rollout"])
    for row in results("overlap-shape").get("arms", ()):
        k, size = int(row["arm"].split()[-1]), SHAPES["smollm2"]
        ahead = rollout_seconds(size, work((k + 1) * 128, 128, 256), gpu) / (k + 1)
        seconds = 1 / row["steps_per_second"]
        yield Case(
            f"step, smollm2, 128 rows, sampled ahead, {row['arm']}", "H200", ahead + update, seconds
        )


def composition() -> Iterator[Case]:
    """Steps on two CPU cores, forecast from the parts of a step on one core."""
    where = "two CPU cores"
    for file, updates_per_step in (("overlap-cpu", 4), ("overlap-cpu-one-update", 1)):
        runs = results(file)["runs"]
        arms = {run["arm"]: [r for r in runs if r["arm"] == run["arm"]] for run in runs}
        base = arms.pop("one core")
        rollout, update = (
            statistics.fmean(run[f"time/{part}"] for run in base) for part in ("rollout", "update")
        )
        for name, arm in arms.items():
            # The default correction of several optimizer steps takes a forward pass for old_logp.
            forward = updates_per_step > 1 and "old_logp" not in name
            split = Split(
                gpus=2, trainers=1, engines=1, engine_gpus=1, rollout=rollout,
                update=update * (1 + forward / 3), sync=0.0, staleness=1,
            )  # fmt: skip
            measured = statistics.fmean(1 / run["steps_per_second"] for run in arm)
            each = f"{updates_per_step} optimizer step{'s' * (updates_per_step > 1)}"
            yield Case(f"step, {name}, {each}", where, split.seconds, measured)
    ranks = results("ranks-cpu")["settings"]["ranks"]
    halves = (ranks["one"]["rollout"] + ranks["one"]["update"]) / 2
    yield Case("step, two trainer ranks, one core each", where, halves, ranks["two"]["step"])


def cases(gpu: Gpu = H200) -> list[Case]:
    """Return every case."""
    return [*generation(gpu), *updates(gpu), *steps(gpu), *composition()]


def table(found: list[Case]) -> str:
    """Return the cases as Markdown."""
    lines = ["| case | measured on | model | measured | difference |", "|---|---|---|---|---|"]
    for one in found:
        times = f"{shown(one.model)} | {shown(one.measured)} | {one.off:+.0%}"
        lines.append(f"| {one.name} | {one.where} | {times} |")
    return "\n".join(lines) + "\n"


def shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.2f} ms"


def split_table() -> str:
    """Return the best splits of clusters as Markdown."""
    load = Workload(rows=1024, group=16, prompt=256, completion=2048)
    lines = [
        "| model | GPUs | trainers | engines | rollout | update | sync | step | in turn |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in best_splits(load):
        trainers = "the same" if row["shared"] else row["trainers"]
        cells = [row["model"], row["gpus"], trainers, f"{row['engines']} x {row['engine_gpus']}"]
        times = [row[key] for key in ("rollout", "update", "sync", "seconds", "seconds_in_turn")]
        lines.append(f"| {' | '.join(map(str, cells))} | {' | '.join(f'{t:.1f}' for t in times)} |")
    return "\n".join(lines) + "\n"


def page_with(text: str, found: list[Case]) -> str:
    """Return the page with its tables replaced."""
    for name, lines in (("measured cases", table(found)), ("splits", split_table())):
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{lines}{end}{rest.partition(end)[2]}"
    return text


def fit() -> Gpu:
    """Return the constants whose largest difference is the least; a high power stands for it."""
    from scipy.optimize import minimize

    def gpu_of(logs: Any) -> Gpu:
        changes = {n: getattr(H200, n) * math.exp(x) for n, x in zip(FITTED, logs, strict=True)}
        return replace(H200, **changes)

    def largest(logs: Any) -> float:
        total: float = sum(abs(math.log1p(one.off)) ** 10 for one in cases(gpu_of(logs)))
        return math.pow(total, 0.1)

    found = [0.0] * len(FITTED)
    for _ in range(6):  # the simplex is started again where it has shrunk
        options = {"maxfev": 1500, "adaptive": True}
        found = minimize(largest, found, method="Nelder-Mead", options=options).x
    return gpu_of(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="Put the tables into docs/scale.md.")
    parser.add_argument("--fit", action="store_true", help="Fit the constants of one GPU.")
    given = parser.parse_args()
    gpu = fit() if given.fit else H200
    found = cases(gpu)
    if given.fit:
        for name in FITTED:
            print(f"{name}: {getattr(H200, name):.3g} -> {getattr(gpu, name):.3g}")
    print(table(found))
    worst = max(found, key=lambda one: abs(one.off))
    print(f"{len(found)} cases; worst: {worst.name}, {worst.off:+.1%}")
    if given.write:
        PAGE.write_text(page_with(PAGE.read_text(), found))
    return int(abs(worst.off) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
