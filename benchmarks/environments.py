"""Environments: the price of slow tools, and what a tool teaches SmolLM2-135M on a GPU.

    python benchmarks/environments.py latency            # two cores, about a minute
    python benchmarks/environments.py train              # one GPU, about five minutes

`latency` plays the same episodes with tools that answer at once, and with tools that sleep 0 to 200
ms before every answer, in processes of their own. Both must be the same rollouts, bit for bit.
`train` runs benchmarks/environments.toml: held-out success before and after, with intervals.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from described import described
from own_process import flags

from covey.config import load_config
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Sampling
from covey.environments.calls import CALL_FORMATS
from covey.environments.host import make_host
from covey.models.load_model import load_language_model
from covey.records.folder import RunFolder
from covey.rollout.episode import Interaction, encode_prompts, generate
from covey.types import Group, Prompt

HERE = Path(__file__).parent


def play(kind: Any, model: Any, *, rollouts: int, concurrent: int) -> tuple[list[Group], float]:
    """Play episodes of four turns; return them and the seconds they took."""
    prompts = [
        Prompt(id=f"p{n}", task="t", target="", messages=({"role": "user", "content": f"{n}+7?"},))
        for n in range(rollouts // 4)
    ]
    sampling = Sampling(group_size=4, max_tokens=64, max_concurrent=concurrent)
    # The host is ready when the clock starts, as it is in all steps of a run but the first.
    with closing(make_host("latency", kind, workers=2)) as host:
        interaction = Interaction(
            host=host, call_format=CALL_FORMATS["hermes"], max_turns=8, max_calls=8, max_tokens=500
        )
        began = time.perf_counter()
        groups = generate(
            encode_prompts(model, prompts, interaction),
            engine=NativeEngine(model),
            model=model,
            sampling=sampling,
            step=1,
            interaction=interaction,
        )
        return groups, time.perf_counter() - began


def latency(concurrent: int) -> dict[str, Any]:
    """Compare instant tools with slow ones, at as many rollouts as slots and at four times that."""
    sys.path.append(str(HERE.parent))
    from tests.environments import worlds

    model = load_language_model("embedded", dtype="float32", device="cpu")
    play(worlds.Quick, model, rollouts=8, concurrent=8)
    found: dict[str, Any] = {}
    for rollouts in (concurrent, 4 * concurrent):
        instant, fast = play(worlds.Counting, model, rollouts=rollouts, concurrent=concurrent)
        slept, slow = play(worlds.Sleeps, model, rollouts=rollouts, concurrent=concurrent)
        tokens = sum(r.sampled for group in instant for r in group.rollouts)
        found[f"{rollouts} rollouts"] = {
            "same": slept == instant,
            "instant_tokens_per_second": round(tokens / fast),
            "slow_tokens_per_second": round(tokens / slow),
            "share": round(fast / slow, 3),
        }
    return found


def train(steps: int, out: Path) -> dict[str, Any]:
    """Train SmolLM2-135M with the calculator; return its evaluations and seconds."""
    began = time.perf_counter()
    settings = {"train.steps": steps, "evaluate.every": max(1, steps // 2)}
    words = ["train", str(HERE / "environments.toml"), *flags(settings), "--run", str(out)]
    subprocess.run([sys.executable, "-m", "covey", *words], check=True)
    run = RunFolder(out)
    rows = run.steps()
    return {
        "config": load_config(str(HERE / "environments.toml")).model_dump(),
        "evaluations": [{"step": row["step"], **row["greedy"]} for row in run.evaluations()],
        "training_seconds": round(sum(row["time/total"] for row in rows), 1),
        "seconds": round(time.perf_counter() - began, 1),
        "tokens": rows[-1]["tokens"],
        "samples": [row["text"] for row in run.usable_rollouts(rows[-1]["step"])[:4]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("latency", "train"))
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--run", type=Path, default=Path("runs/environments"))
    parser.add_argument("--out", type=Path, help="result file")
    given = parser.parse_args()
    torch.set_num_threads(1 if given.what == "latency" else torch.get_num_threads())
    found = latency(given.concurrent) if given.what == "latency" else train(given.steps, given.run)
    device = "cuda" if given.what == "train" and torch.cuda.is_available() else "cpu"
    report = {**described(0, device, torch.get_num_threads()), given.what: found}
    print(json.dumps(report, indent=1))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
