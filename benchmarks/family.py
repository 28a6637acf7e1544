"""Questions to algorithms that are not GRPO, each on the embedded model with several seeds.

    python benchmarks/family.py parts        # gdpo: a reward of two parts, one ten times as varied
    python benchmarks/family.py pass_at_8    # pkpo: pass@8 where successes are rare
    python benchmarks/family.py teacher      # opd: towards a checkpoint that GRPO made
    python benchmarks/family.py self         # sdpo: the policy, told the working, teaches itself

Both algorithms of a question end after the same number of sampled tokens (`--tokens`), up to one
step. With `--tokens 0` they end after the same number of steps. A difference is paired by seed; its
interval is Student's, of as many pairs as there are seeds.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from described import described
from own_process import flags
from scipy import stats

import covey
from covey.config.resolve import resolve, sampling_of
from covey.engines.native.engine import NativeEngine
from covey.models.load_model import load_language_model
from covey.records.folder import RunFolder
from covey.rewards import Score
from covey.rollout.episode import encode_prompts, generate
from covey.tasks.registry import make_task
from covey.types import Prompt

RESULTS = Path(__file__).parent / "results"
SHORT = 48
"""Characters that a correct completion needs at most, if it ends with its answer."""
LENGTH_WEIGHT = 0.355
"""Makes the variance of `terse` within groups ten times that of `correct` before training, where
characters above SHORT have a variance of 9.1 and `correct` one of 0.115."""


class TwoParts:
    """Whether the answer is correct, and how many characters the completion has above SHORT."""

    bounds = (-100.0, 1.0)
    quick = True
    version = 1

    def __call__(self, prompt: Prompt, text: str) -> Score:
        found = re.search(r"<answer>\s*(-?\d+)", text)
        correct = found is not None and int(found[1]) == int(prompt.target)
        parts = {"correct": float(correct), "terse": -LENGTH_WEIGHT * max(0, len(text) - SHORT)}
        return Score(reward=sum(parts.values()), success=correct, parts=parts)


def parts_of(evaluation: dict[str, Any]) -> dict[str, float]:
    parts = evaluation["parts"]
    return {"correct": parts["correct"], "characters_too_many": -parts["terse"] / LENGTH_WEIGHT}


def samples_of(evaluation: dict[str, Any]) -> dict[str, float]:
    return {name: evaluation[name]["value"] for name in ("mean@8", "pass@8", "greedy")}


def greedy_of(evaluation: dict[str, Any]) -> dict[str, float]:
    return {"greedy": evaluation["greedy"]["value"]}


Read = Callable[[dict[str, Any]], dict[str, float]]
QUESTIONS: dict[str, tuple[tuple[str, str], dict[str, Any], Read]] = {
    "parts": (("grpo", "gdpo"), {}, parts_of),
    "teacher": (("grpo", "opd"), {}, greedy_of),
    "self": (("grpo", "sdpo"), {}, greedy_of),
    "pass_at_8": (
        ("grpo", "pkpo"),
        # Half of the groups of 16 have no success, and pass@8 before training is about 0.2.
        {"task.min_operations": 4, "task.max_operations": 5, "rollout.group_size": 16,
         "evaluate.samples": 8, "evaluate.prompts": 200},
        samples_of,
    ),
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "pkpo": {"objective": {"name": "pkpo", "k": 8}},
    "sdpo": {
        "teacher.policy": "frozen",
        "teacher.context": {"worked": "{text}"},
        "teacher.template": "{prompt}{context}",
    },
}
"""Settings of one algorithm alone."""
HINTED, PLAIN, SFT_STEPS = 2000, 250, 300
"""Prompts with and without the working in the data that teaches the embedded model to read it."""


def train(
    question: str, name: str, seed: int, given: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Train once, and return the held-out numbers before and after."""
    _, settings, read = QUESTIONS[question]
    limit: dict[str, Any] = {"train.stop_after": {"tokens": given.tokens}} if given.tokens else {}
    limit |= learning_from(folder, given) if name == "opd" else {}
    limit |= {"model.path": str(reading_model(folder))} if question == "self" else {}
    started = time.perf_counter()
    result = covey.train(
        "arithmetic", rewards=TwoParts() if question == "parts" else None,
        run=folder / f"{name}-{seed}", quiet=True,
        **{"objective": {"name": name}, "seed": seed, "train.steps": given.steps,
           "rollout.prompts_per_step": given.prompts, "evaluate.every": given.steps,
           "evaluate.prompts": 100, "save.every": 0, **limit, **settings, **OWN.get(name, {})},
    )  # fmt: skip
    found = RunFolder.open(result.folder).evaluations()
    before, after = read(found[0]), read(found[-1])
    seconds = round(time.perf_counter() - started, 1)
    row = {"algorithm": name, "seed": seed, "seconds": seconds}
    row |= {key: result.metrics[-1][key] for key in ("step", "tokens")}
    print({**row, "before": before, "after": after}, flush=True)
    return {**row, "before": before, "after": after}


def learning_from(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a distillation: as many completions, one of each prompt.

    The teacher is the embedded model after `--teacher-steps` steps of GRPO with another seed. Its
    tokens do not count: a teacher is there already.
    """
    path = folder / "teacher"
    if not path.exists():
        covey.train(
            "arithmetic", run=path, quiet=True,
            **{"seed": 99, "train.steps": given.teacher_steps, "save.every": 0,
               "evaluate.every": given.teacher_steps, "evaluate.prompts": 100},
        )  # fmt: skip
        print("teacher", RunFolder.open(path).evaluations()[-1]["greedy"], flush=True)
    newest = RunFolder.open(path).checkpoints()[-1][1]
    return {
        "teacher.path": str(newest), "rollout.group_size": 1,
        "rollout.prompts_per_step": given.prompts * 8,
    }  # fmt: skip


def reading_model(folder: Path) -> Path:
    """Return a checkpoint of the embedded model that uses a working in the prompt.

    The embedded model ignores a text after the question, so it could teach itself nothing. It is
    trained on correct solutions of prompts with the working, and on its own completions of prompts
    without it, so that without the working it stays about as bad as it was.
    """
    path = folder / "reading"
    if not path.exists():
        prompts = make_task("arithmetic", {}).train()[: HINTED + PLAIN]
        model = load_language_model("embedded", device="cpu")
        sampling = sampling_of(resolve(covey.load_config("arithmetic")))
        own = generate(
            encode_prompts(model, prompts[HINTED:]),
            engine=NativeEngine(model), model=model, sampling=sampling, step=1,
        )  # fmt: skip
        form = "<think>{}</think><answer>{}</answer>".format
        rows = [
            (p.text + p.info["worked"], form(p.info["worked"], p.target)) for p in prompts[:HINTED]
        ]
        rows += [(g.prompt.text, r.text) for g in own for r in g.rollouts if r.finish == "stop"]
        lines = [json.dumps({"question": q, "completion": text}) + "\n" for q, text in rows]
        file = folder / "reading.jsonl"
        file.write_text("".join(lines), encoding="utf-8")
        settings = {
            "sft.file": file, "sft.steps": SFT_STEPS, "sft.learning_rate": 1e-3,
            "sft.evaluate_every": 0,
        }  # fmt: skip
        command = [sys.executable, "-m", "covey", "sft", "arithmetic", "--run", str(path)]
        subprocess.run([*command, *flags(settings)], check=True)
    return RunFolder.open(path).checkpoints()[-1][1]


def difference(rows: list[dict[str, Any]], names: tuple[str, str], metric: str) -> dict[str, float]:
    """Return the mean difference of the second algorithm to the first after training."""
    by = {(row["algorithm"], row["seed"]): row["after"][metric] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    gaps = [by[names[1], seed] - by[names[0], seed] for seed in seeds]
    mean = statistics.fmean(gaps)
    if len(gaps) < 2:
        return {"mean": mean}
    interval = stats.ttest_1samp(gaps, 0.0).confidence_interval(0.95)
    return {"mean": mean, "low": float(interval.low), "high": float(interval.high)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=100_000, help="Sampled tokens of a run.")
    parser.add_argument("--prompts", type=int, default=16, help="Prompts of a step.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--teacher-steps", type=int, default=60, help="Of the teacher's own run.")
    parser.add_argument("--folder", type=Path, help="Keep the runs in this folder.")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    names = QUESTIONS[given.question][0]
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory() as folder:
        rows = [
            train(given.question, name, seed, given, Path(folder))
            for seed in range(given.seeds)
            for name in names
        ]
    report = {
        "question": given.question,
        "steps": given.steps,
        "prompts_per_step": given.prompts,
        **({"tokens": given.tokens, "teacher_steps": given.teacher_steps} if given.tokens else {}),
        "environment": described(0, "cpu", 1),
        "runs": rows,
        "differences": {
            f"{names[1]} - {names[0]}, {metric}": difference(rows, names, metric)
            for metric in rows[0]["after"]
        },
    }
    output = given.output or RESULTS / f"family-{given.question}.json"
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
