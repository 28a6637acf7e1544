"""Worker processes of step_vs_trl.py: each takes one measurement and writes it to a file.

Heavy imports stay inside functions, so that the driver can import the settings cheaply.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.records.trackers import Tracker

if TYPE_CHECKING:
    from transformers import TrainerCallback
    from trl import GRPOConfig

    from covey.types import Prompt

PROMPTS = 16
SAMPLES = 8
MAX_TOKENS = 36
UPDATES = 4
SEED = 0
COMPLETIONS = PROMPTS * SAMPLES
OPERATIONS = {"min_operations": 2, "max_operations": 3}
# So small that the policy hardly changes: completions keep their length, and every step does the
# same work. The cost of a step does not depend on the rate.
LEARNING_RATE = 1e-6
BETAS = (0.9, 0.999)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Measurements of one process, one entry per timed step."""

    seconds: list[float]
    tokens: list[int]
    """Tokens sampled, end-of-sequence included."""
    stopped: list[float]
    """Share of completions that stopped before the limit."""
    rewards: list[float]

    @staticmethod
    def join(parts: list[Steps]) -> Steps:
        """Concatenate the rounds of one library."""
        fields = ("seconds", "tokens", "stopped", "rewards")
        return Steps(**{f: [x for part in parts for x in getattr(part, f)] for f in fields})

    @property
    def median(self) -> float:
        """Seconds per step."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens over the time of the whole step, updates included; the median step."""
        return statistics.median(t / s for t, s in zip(self.tokens, self.seconds, strict=True))

    @property
    def length(self) -> float:
        """Mean tokens of a completion."""
        return statistics.fmean(self.tokens) / COMPLETIONS


def time_covey(warmup: int, steps: int) -> Steps:
    """Train with covey and time its steps."""
    from covey.config import load_config, to_toml
    from covey.config.resolve import resolve
    from covey.loop import train
    from covey.records.folder import RunFolder
    from covey.run import Run
    from covey.stopping import StopSignal

    config = resolve(load_config("arithmetic", _covey_settings(warmup + steps)))
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder) / "run", to_toml(config), {})
        train(Run.build(config), run, [watch], StopSignal())
    timed = watch.rows[warmup:]
    assert len(timed) == steps
    return Steps(
        # Everything except writing the metrics line, about a millisecond.
        seconds=[row["time/total"] for row in timed],
        tokens=[round(row["val/sequence_lengths"] * COMPLETIONS) for row in timed],
        stopped=[row["rollout/stop_rate"] for row in timed],
        rewards=[row["objective/scores"] for row in timed],
    )


def _covey_settings(steps: int) -> list[str]:
    return [
        f"seed={SEED}",
        "model.device=cpu",
        "model.dtype=float32",
        *(f"task.{name}={value}" for name, value in OPERATIONS.items()),
        "objective.clip_low=0.2",
        "objective.clip_high=0.2",
        "objective.beta=0.0",
        f"rollout.prompts_per_step={PROMPTS}",
        f"rollout.group_size={SAMPLES}",
        f"rollout.max_tokens={MAX_TOKENS}",
        "rollout.temperature=1.0",
        f"optimizer.learning_rate={LEARNING_RATE}",
        f"optimizer.beta1={BETAS[0]}",
        f"optimizer.beta2={BETAS[1]}",
        "optimizer.schedule=constant",
        "optimizer.max_grad_norm=1.0",
        f"train.steps={steps}",
        f"train.mini_batches={UPDATES}",
        "evaluate.every=0",
        "save.every=0",
        "save.rollouts=false",
    ]


class Watch(Tracker):
    """A tracker that keeps the metrics."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.rows.append(metrics)

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)


def time_trl(warmup: int, steps: int, cache: str) -> Steps:
    """Train with TRL on covey's prompts, in the same order, and time its steps."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    from covey.embedded import CHECKPOINT

    model = AutoModelForCausalLM.from_pretrained(str(CHECKPOINT), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(CHECKPOINT), padding_side="left")
    prompts = _rendered_prompts(tokenizer, warmup + steps)
    recorder = _TrlReward(dict(prompts), tokenizer.eos_token_id)
    marks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=recorder.reward,
            args=_trl_arguments(folder, warmup + steps, cache),
            train_dataset=Dataset.from_dict({"prompt": [text for text, _ in prompts]}),
            processing_class=tokenizer,
            callbacks=[stopwatch(marks, UPDATES)],
        )
        trainer.train()
    # A TRL release that generates more or less often would be timed wrongly: fail instead.
    assert trainer.state.global_step == UPDATES * (warmup + steps)
    assert len(recorder.tokens) == len(marks) - 1 == warmup + steps
    seconds = [after - before for before, after in itertools.pairwise(marks)]
    return Steps(
        seconds=seconds[warmup:],
        tokens=recorder.tokens[warmup:],
        stopped=recorder.stopped[warmup:],
        rewards=recorder.rewards[warmup:],
    )


def _rendered_prompts(tokenizer: Any, steps: int) -> list[tuple[str, Prompt]]:
    """Return the text of every prompt, 16 per step.

    Text, not messages: TRL then need not render the chat template again for each of 128 rows.
    """
    from covey.rollout.prompts import step_prompts
    from covey.tasks.registry import make_task

    task = make_task("arithmetic", OPERATIONS).train()
    drawn = [p for s in range(steps) for p in step_prompts(task, seed=SEED, step=s, count=PROMPTS)]
    rendered = []
    for prompt in drawn:
        text = tokenizer.apply_chat_template(
            [dict(m) for m in prompt.messages], tokenize=False, add_generation_prompt=True
        )
        expected = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer(text=text)["input_ids"] == expected, "the same tokens as covey's"
        assert len(expected) == len(text), "`floor_gflop` assumes one token per character"
        rendered.append((text, prompt))
    return rendered


class _TrlReward:
    """covey's reward as a TRL reward function, with statistics of each rollout batch."""

    def __init__(self, prompts: Mapping[str, Prompt], eos: int) -> None:
        from covey.rewards import ThinkAnswer

        self.score = ThinkAnswer()
        self.prompts = prompts
        self.eos = eos
        self.tokens: list[int] = []
        self.stopped: list[float] = []
        self.rewards: list[float] = []

    def reward(
        self,
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        **_: object,
    ) -> list[float]:
        """Score one rollout batch."""
        assert len(completions) == COMPLETIONS, "TRL must call the reward once per rollout batch"
        assert len(set(prompts)) <= PROMPTS
        rewards = [
            self.score(self.prompts[prompt], text).reward
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        self.tokens.append(sum(len(ids) for ids in completion_ids))
        self.stopped.append(statistics.fmean(ids[-1] == self.eos for ids in completion_ids))
        self.rewards.append(statistics.fmean(rewards))
        return rewards


def _trl_arguments(folder: str, steps: int, cache: str) -> GRPOConfig:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,  # TRL's default is True
        # 128 completions in one `generate`, then an optimizer step on each quarter of them.
        per_device_train_batch_size=COMPLETIONS // UPDATES,
        steps_per_generation=UPDATES,
        max_steps=UPDATES * steps,
        num_generations=SAMPLES,
        max_completion_length=MAX_TOKENS,
        cache_implementation=cache,
        dataloader_pin_memory=False,  # nothing to pin for without a GPU
        **PLAIN_TRL,
    )


PLAIN_TRL: Mapping[str, Any] = {
    "seed": SEED,
    "gradient_checkpointing": False,  # TRL's default is True
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "temperature": 1.0,
    "use_vllm": False,
    "shuffle_dataset": False,
    "loss_type": "grpo",
    "beta": 0.0,
    "epsilon": 0.2,
    "optim": "adamw_torch_fused",
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "adam_beta1": BETAS[0],
    "adam_beta2": BETAS[1],
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "save_strategy": "no",
    "logging_strategy": "no",
    "logging_nan_inf_filter": False,
    "report_to": "none",
    "disable_tqdm": True,
}
"""TRL settings that do the same work as covey, with every optional feature off."""


def stopwatch(marks: list[float], updates: int) -> TrainerCallback:
    """Note the time at the start and after every rollout batch, which is `updates` TRL steps."""
    from transformers import TrainerCallback

    class Stopwatch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            marks.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % updates == 0:
                marks.append(time.perf_counter())

    return Stopwatch()


def measure_matmul(size: int = 1024, repeats: int = 30) -> float:
    """Return the best GFLOP/s of a float32 matrix product, for the floor."""
    import torch

    left, right = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best / 1e9


def main() -> None:
    """Take one measurement and write it to the output file."""
    import torch

    parser = argparse.ArgumentParser(description="One process of step_vs_trl.py.")
    parser.add_argument("name", choices=["covey", "trl", "matmul"])
    for option in ("steps", "warmup", "threads"):
        parser.add_argument(f"--{option}", type=int, required=True)
    parser.add_argument("--trl-cache", required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    workers: dict[str, Callable[[], Any]] = {
        "covey": lambda: asdict(time_covey(arguments.warmup, arguments.steps)),
        "trl": lambda: asdict(time_trl(arguments.warmup, arguments.steps, arguments.trl_cache)),
        "matmul": measure_matmul,
    }
    arguments.output.write_text(json.dumps(workers[arguments.name]()))


if __name__ == "__main__":
    main()
