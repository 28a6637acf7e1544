"""Training on several ranks: speed-up of two over one, and what sharding costs on one GPU.

    python benchmarks/ranks.py                    # gloo: one rank and two, each with one thread
    python benchmarks/ranks.py --device cuda      # one GPU: FSDP2 on one rank beside the plain step

On a CPU, runs of `covey train` with the embedded model are started as torchrun would, in turn and
several times; the fastest round of each counts. `waiting` is the time that a rank spends in calls
that wait for others, which includes uneven shares. On a GPU, weights of a published shape are
random, and the plain step is measured with fused passes, with and without CUDA graphs; a sharded
model runs fused passes without graphs. A second part trains two steps and compares the peak of
torch's allocator with its forecast.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from memory import RESULTS, SHAPES, compare, make_model, report
from own_process import flags

SETTINGS = (
    "model.device=cpu", "rollout.prompts_per_step=32", "rollout.group_size=8",
    "rollout.max_tokens=40", "train.steps=5", "train.micro_batch_tokens=4096", "evaluate.every=0",
    "save.every=0", "save.rollouts=false", "objective.beta=0.04",
)  # fmt: skip
SPEED_UP, OVERHEAD, MEMORY = 1.5, 0.10, 0.05
"""What two ranks must gain, and what one sharded rank may cost in time and be off in memory."""
SECONDS = 600
BUDGETS = (16_384, 4_096)
"""Tokens of a micro-batch: the default, and passes that are limited by launches."""
KINDS = ("fused", "fsdp", "graphs")


def as_rank(output: Path, run: str) -> None:
    """Train as one rank, and write down how long it waited for others."""
    from covey.cli.main import run as covey
    from covey.parallel.world import Ranks

    waited, wait = [0.0], Ranks.wait

    def timed(self: Ranks, work: Any) -> None:
        started = time.perf_counter()
        wait(self, work)
        waited[0] += time.perf_counter() - started

    Ranks.wait = timed  # type: ignore[method-assign]
    code = covey(["train", "arithmetic", *flags(SETTINGS), "--run", run])
    output.write_text(json.dumps({"waited": waited[0]}))
    sys.exit(code)


def trained(ranks: int, folder: Path) -> dict[str, float]:
    """Train on some ranks; return the median seconds of a step and of its parts."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in range(ranks):
        place = {
            "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        output = folder / f"{rank}.json"
        command = [sys.executable, __file__, "--as-rank", str(output), str(folder / "run")]
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=None)
        )
    codes = [process.wait(SECONDS) for process in processes]
    if any(codes):
        sys.exit(f"error: ranks ended with {codes}")
    rows = [json.loads(line) for line in (folder / "run" / "steps.jsonl").read_text().splitlines()]
    names = {"step": "time/total", "rollout": "time/rollout", "update": "time/training"}
    # The first step is slower: memory is allocated then.
    found = {
        name: statistics.median(row[metric] for row in rows[1:]) for name, metric in names.items()
    }
    waits = [json.loads((folder / f"{r}.json").read_text())["waited"] for r in range(ranks)]
    return {**found, "waiting": max(waits) / len(rows)}


def on_cpu(rounds: int) -> dict[str, Any]:
    """Measure one rank and two in turn."""
    taken: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for number in range(rounds):
        for ranks, found in taken.items():
            with tempfile.TemporaryDirectory() as folder:
                found.append(trained(ranks, Path(folder)))
            print(f"round {number + 1}, {ranks} ranks: {_text(found[-1])}", flush=True)
    one, two = (min(taken[ranks], key=lambda row: row["step"]) for ranks in (1, 2))
    up = {name: one[name] / two[name] for name in ("step", "rollout", "update")}
    print(f"two ranks are {up['step']:.2f} times as fast as one (rollout {up['rollout']:.2f}, "
          f"update {up['update']:.2f}); wanted: {SPEED_UP}")  # fmt: skip
    return {"one": one, "two": two, "speed_up": up, "wanted": SPEED_UP, "rounds": taken}


def _text(row: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in row.items())


def on_gpu(repeat: int, device: str) -> Iterator[dict[str, Any]]:
    """Measure optimizer steps plain and sharded, and memory beside its forecast.

    Yields all results so far after each part.
    """
    found: dict[str, Any] = {"wanted": OVERHEAD, "memory_wanted": MEMORY, "steps": []}
    for tokens in BUDGETS if device == "cuda" else (256,):
        steps = step_seconds(repeat, device, tokens)
        cost = {kind: steps["fsdp"] / seconds - 1 for kind, seconds in steps.items()}
        print(f"FSDP2 on one rank, micro-batches of {tokens} tokens: {cost['graphs']:+.1%} beside "
              f"graphs, {cost['fused']:+.1%} beside fused passes; wanted: at most {OVERHEAD:.0%}",
              flush=True)  # fmt: skip
        found["steps"].append({"micro_batch_tokens": tokens, "seconds": steps, "overhead": cost})
        yield found
    if device != "cuda":
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(SHAPES["llama-1b"], Path(folder) / "llama-1b", weights=False)
        row = compare("llama-1b-fsdp", "cuda", Path(folder))
    sizes = (row["forecast_bytes"] / 2**30, row["allocated_bytes"] / 2**30)
    print("memory: forecast {:.2f} GiB, allocated {:.2f} GiB".format(*sizes))
    print(f"the forecast is off by {row['ratio'] - 1:+.1%}; wanted: within {MEMORY:.0%}")
    yield found | {"memory": row}


def step_seconds(repeat: int, device: str, tokens: int) -> dict[str, float]:
    """Return the median seconds of an optimizer step for each kind of pass."""
    from speed_device import forget, seconds_of
    from speed_shapes import shapes, tiny_shapes
    from update_gpu import Setting, make_batch

    from covey.config import load_config
    from covey.objective import ALGORITHMS, with_advantage
    from covey.parallel.join import joined_world
    from covey.run import Run
    from covey.step import StepSettings, optimize

    shape = (shapes() if device == "cuda" else tiny_shapes())["qwen2.5"]
    objective = ALGORITHMS["grpo"](beta=0.0)
    batch = with_advantage(objective, make_batch(shape, Setting().group, device))
    settings = StepSettings(
        mini_batches=1, epochs=1, micro_batch_tokens=tokens, old_logp_from_sampler=True,
        learning_rate=lambda *_: 1e-6, seed=0,
    )  # fmt: skip
    config = load_config(None, [f"model.device={device}", "parallel.strategy=fsdp"])
    found: dict[str, float] = {}
    with joined_world(config) as world:
        for kind in KINDS:
            forget(device)
            learner = Run(
                policy=policy_of(kind, shape, device, world), objective=objective,
                settings=settings, world=world,
            )  # fmt: skip
            step = partial(optimize, learner, batch, step=0)
            times = [seconds_of(step, device) for _ in range(3 + repeat)][3:]
            found[kind] = statistics.median(times)
            print(f"{tokens} tokens, {kind}: {found[kind] * 1000:.1f} ms a step", flush=True)
    return found


def policy_of(kind: str, shape: Any, device: str, world: Any) -> Any:
    from speed_shapes import random_model, word_tokenizer
    from update_gpu import Setting

    from covey.config.schema import Parallel
    from covey.models.load_model import wrap
    from covey.parallel.shard import gathered_steps, shard_model
    from covey.policy.optimizer import MasterAdamW
    from covey.policy.policy import Policy

    model = random_model(shape.config, dtype=Setting(device=device).dtype, device=device)
    model = wrap(model, word_tokenizer(shape.config.vocab_size), "made up")
    if kind == "fsdp":
        model = shard_model(model, Parallel(strategy="fsdp"), world)
    optimizer = MasterAdamW(
        model.model.named_parameters(), betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    return Policy(
        model=model, optimizer=optimizer, temperature=1.0, logits_megabytes=512.0,
        graphs=kind == "graphs", sums=gathered_steps(model, world) if model.sharded else None,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3, help="on a CPU; on a GPU, steps timed")
    parser.add_argument("--tiny", action="store_true", help="try the GPU part on a CPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        as_rank(Path(options.as_rank[0]), options.as_rank[1])
    if options.tiny:
        list(on_gpu(options.rounds, "cpu"))
        return
    out = options.out or RESULTS / f"ranks-{'cpu' if options.device == 'cpu' else 'gpu'}.json"
    on_device = on_gpu(3, "cuda") if options.device == "cuda" else [on_cpu(options.rounds)]
    for measured in on_device:
        result = report(options.device, {"ranks": measured})
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
