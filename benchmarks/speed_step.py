"""Sections about whole steps: beside TRL's trainer, and at the size of a published comparison.

Both sides train the same random weights on the same prompts with the same reward. TRL's are
bfloat16 on a GPU, without covey's float32 master weights, which is TRL's cheapest setting. TRL
needs `trl`, `datasets` (with `dill`, `multiprocess` and `xxhash`) and `accelerate`; where one is
missing, its row says so. On a machine without a network they can be unpacked from wheels, without
their other dependencies, into a folder that PYTHONPATH names:

    pip download --no-deps --only-binary :all: --python-version 3.12 -d wheels \\
        trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 xxhash==4.1.0
    for wheel in wheels/*.whl; do python -m zipfile -e $wheel unpacked; done
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from speed_device import forget, peaks
from speed_report import Report, reason
from speed_shapes import prompt_text, random_model, word_tokenizer
from speed_sizes import Sizes
from step_workers import PLAIN_TRL, Watch, stopwatch

from covey.config import Config, load_config
from covey.config.resolve import resolve
from covey.rewards.score import Score
from covey.rollout.prompts import step_prompts
from covey.tasks.task import Generated, chat_messages
from covey.trust import trust
from covey.types import Prompt

PUBLISHED_MINUTES = 300
"""Three algorithms x 200 steps of 2 x 8 completions of 400 tokens, Qwen2.5-1.5B, one A800."""
SEED_STEPS = 200
"""Steps of each algorithm in that comparison."""
SEED_ALGORITHMS = ("grpo", "dr_grpo", "gspo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A task whose prompts are a fixed number of random words."""

    words: int = 128
    vocabulary: int = 49_152
    name: ClassVar[str] = "words"

    def train(self) -> Sequence[Prompt]:
        """Return prompts for every step."""
        return Generated(4096, self._prompt)

    def held_out(self) -> Sequence[Prompt]:
        """Return one prompt; the benchmark never evaluates."""
        return Generated(1, lambda number: self._prompt(4096 + number))

    def _prompt(self, number: int) -> Prompt:
        text = prompt_text(number, words=self.words, vocabulary=self.vocabulary)
        return Prompt(id=f"words/{number}", task=self.name, messages=chat_messages(text), target="")


def even_words(text: str) -> float:
    """Score a completion by the share of its words whose number is even."""
    words = text.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))


@dataclass(frozen=True, slots=True)
class EvenWords:
    """The same score as a covey reward."""

    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)
    quick: ClassVar[bool] = True
    version: ClassVar[int] = 1

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Score one completion."""
        reward = even_words(text)
        return Score(reward=reward, success=reward > 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Metrics and start-up time of one covey run."""

    rows: Sequence[Mapping[str, Any]]
    """The metrics of each step."""
    startup: float
    """Seconds from model creation to the end of the warm-up steps, minus as many usual steps."""

    def median(self, name: str) -> float:
        return float(statistics.median(row[name] for row in self.rows))


class Stopwatch(Watch):
    """A tracker that notes when each step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[float] = []

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Note the time of a finished step."""
        super().step(metrics)
        self.marks.append(time.perf_counter())


def run_config(
    sizes: Sizes, name: str, overrides: Sequence[str], *, steps: int, recipe: str | None = None
) -> Config:
    """Return the settings of a run on random words, without evaluation or checkpoints."""
    shape = sizes.shapes[name]
    trust(["speed_step"])  # this module's own task
    settings = [
        "model.path=made-up",
        f"model.device={sizes.device}",
        "task.name=speed_step:Words",
        f"task.words={sizes.prompt}",
        f"task.vocabulary={shape.config.vocab_size}",
        f"train.steps={steps}",
        "evaluate.every=0",
        "save.every=0",
        "save.rollouts=false",
    ]
    if recipe is None:
        settings += [
            f"train.micro_batch_tokens={shape.budgets[0]}",
            f"train.logits_megabytes={shape.megabytes}",
        ]
    return resolve(load_config(recipe, [*settings, *overrides]))


def covey_run(sizes: Sizes, name: str, config: Config, *, warmup: int) -> Timed:
    """Train random weights with covey's own loop; the first steps are not timed."""
    from covey.accel.activation_offload import checkpoint_layers
    from covey.loop import train
    from covey.models.load_model import wrap
    from covey.records.folder import RunFolder
    from covey.run import Run
    from covey.stopping import StopSignal

    shape = sizes.shapes[name]

    def load(
        path: str, *, gradient_checkpointing: bool, offload_activations: bool, **_: Any
    ) -> Any:
        model = random_model(shape.config, dtype=sizes.dtype, device=sizes.device)
        if gradient_checkpointing:
            checkpoint_layers(model, offload=offload_activations)
        return wrap(model, word_tokenizer(shape.config.vocab_size), path)

    watch = Stopwatch()
    started = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("covey.policy.policy.load_language_model", load),
        mock.patch("covey.config.check.check_model_path"),
        mock.patch.object(Run, "save"),
    ):
        parts = Run.build(config, EvenWords())
        with closing(parts.scorer):
            run = RunFolder.create(Path(folder) / "run", "", {})
            train(parts, run, [watch], StopSignal())
    totals = [row["time/total"] for row in watch.rows]
    usual = statistics.median(totals[warmup:])
    # What passed before the first step, and what the warm-up steps took beyond a usual step.
    startup = watch.marks[0] - started - totals[0]
    startup += sum(max(0.0, total - usual) for total in totals[:warmup])
    return Timed(rows=watch.rows[warmup:], startup=startup)


def step_covey(sizes: Sizes) -> dict[str, Any]:
    """Measure covey's steps; runs in a worker process."""
    completions = sizes.prompts * sizes.group
    overrides = (
        f"rollout.prompts_per_step={sizes.prompts}",
        f"rollout.group_size={sizes.group}",
        f"rollout.max_tokens={sizes.tokens}",
        f"engine.max_concurrent={completions}",
        "objective.beta=0.0",
    )
    config = run_config(sizes, "smollm2", overrides, steps=sizes.warmup + sizes.steps)
    run = covey_run(sizes, "smollm2", config, warmup=sizes.warmup)
    written = {round(row["val/sequence_lengths"] * completions) for row in run.rows}
    assert written == {completions * sizes.tokens}, "a completion stopped early"
    return {
        "all_seconds": [row["time/total"] for row in run.rows],
        "rollout": run.median("time/rollout"),
        "update": run.median("time/training"),
        "tokens": completions * sizes.tokens,
        "startup": run.startup,
        **peaks(sizes.device),
    }


def step_trl(sizes: Sizes) -> dict[str, Any]:
    """Measure TRL's steps on the same data; runs in a worker process."""
    import trl
    from datasets import Dataset

    shape, completions = sizes.shapes["smollm2"], sizes.prompts * sizes.group
    vocabulary, steps = shape.config.vocab_size, 1 + sizes.trl_steps
    written: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        written.append(sum(len(ids) for ids in completion_ids))
        return [even_words(text) for text in completions]

    task = Words(words=sizes.prompt, vocabulary=vocabulary).train()
    draws = (step_prompts(task, seed=0, step=n, count=sizes.prompts) for n in range(steps))
    cuda = sizes.device.startswith("cuda")
    marks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=not cuda,
            bf16=cuda,
            per_device_train_batch_size=completions,
            steps_per_generation=1,
            max_steps=steps,
            num_generations=sizes.group,
            max_completion_length=sizes.tokens,
            dataloader_pin_memory=cuda,
            **PLAIN_TRL,
        )
        trainer = trl.GRPOTrainer(
            model=random_model(shape.config, dtype=sizes.dtype, device=sizes.device),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict(
                {"prompt": [p.text for p in chain.from_iterable(draws)]}
            ),
            processing_class=word_tokenizer(vocabulary),
            callbacks=[stopwatch(marks, 1)],
        )
        trainer.train()
    assert written == [completions * sizes.tokens] * steps, (
        "TRL must generate once per step, at full length"
    )
    seconds = [after - before for before, after in pairwise(marks)]
    version = {"version": trl.__version__}
    return {
        "all_seconds": seconds[1:], "tokens": written[0], **version, **peaks(sizes.device),
    }  # fmt: skip


def step(sizes: Sizes, report: Report, own_process: Any) -> None:
    """Measure a step of covey and one of TRL, each in a fresh process."""
    forget(sizes.device)
    own: float | None = None
    for who, worker in (("covey", "step_covey"), ("TRL", "step_trl")):
        try:
            found = own_process(worker)
        except Exception as error:
            report.row("step", shape="smollm2", who=who, missing=reason(error))
            continue
        seconds = statistics.median(found["all_seconds"])
        own = seconds if who == "covey" else own
        named = f"{who} {found['version']}" if "version" in found else who
        report.row(
            "step", shape="smollm2", who=named, seconds=seconds, fastest=min(found["all_seconds"]),
            tokens_per_s=found["tokens"] / seconds, **found,
            ratio=seconds / own if who != "covey" and own else None,
            ran=f"{len(found['all_seconds'])} steps of {sizes.prompts} x {sizes.group} "
            f"completions of {sizes.tokens} tokens, one update",
        )  # fmt: skip


def seed_shape(sizes: Sizes, report: Report) -> None:
    """Measure three algorithms at the size of a published comparison."""
    completions = sizes.seed_prompts * sizes.group
    minutes = 0.0
    for algorithm in SEED_ALGORITHMS:
        forget(sizes.device)
        overrides = (
            f"objective.name={algorithm}",
            f"rollout.prompts_per_step={sizes.seed_prompts}",
            f"rollout.group_size={sizes.group}",
            f"rollout.max_tokens={sizes.seed_tokens}",
            f"engine.max_concurrent={completions}",
        )
        config = run_config(sizes, "qwen2.5", overrides, steps=3 + sizes.seed_steps)
        run = covey_run(sizes, "qwen2.5", config, warmup=3)
        seconds = run.median("time/total")
        mean = statistics.fmean(row["time/total"] for row in run.rows)
        taken = (run.startup + SEED_STEPS * mean) / 60
        minutes += taken
        report.row(
            "seed_shape", shape="qwen2.5", who=algorithm, steps=len(run.rows), seconds=seconds,
            mean_seconds=mean, rollout=run.median("time/rollout"),
            update=run.median("time/training"),
            startup=run.startup, minutes=taken, **peaks(sizes.device),
            ran=f"{sizes.seed_prompts} x {sizes.group} completions of {sizes.seed_tokens} tokens; "
            f"minutes: start-up and {SEED_STEPS} steps",
        )  # fmt: skip
    report.row(
        "seed_shape", shape="qwen2.5", who="all three", minutes=minutes,
        ratio=PUBLISHED_MINUTES / minutes if sizes.device.startswith("cuda") else None,
        ran=f"published: about {PUBLISHED_MINUTES / 60:.0f} hours on an A800",
    )  # fmt: skip
