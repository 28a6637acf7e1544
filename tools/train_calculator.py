"""Train the embedded calculator model (`python -m tools.train_calculator [FOLDER]`).

A Llama of 270 thousand parameters is trained with SFT on products of three-digit numbers, which
such a small model cannot compute. Most solutions in the training data are guesses, like the first
of these two solutions:

    472*839?  <answer>402518</answer>
    472*839?  <calculator>472*839</calculator><result>396008</result><answer>396008</answer>

One solution in eight calls the calculator, and some of these calls have a wrong digit. The text
from <result> to </result> comes from the calculator, and SFT does not train on it. After SFT,
reinforcement learning has to teach the model to call the calculator instead of guessing, and to
copy the numbers correctly.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import torch

from covey.embedded import CALCULATOR
from covey.models.language_model import LanguageModel
from covey.models.load_model import wrap
from covey.recipes.agent_calculator.environment import factors
from covey.sft import stack
from covey.types import Batch, Rollout
from tools.train_embedded import BATCH, Stage, build_model, build_tokenizer, train_stage

SEED, DIGITS = 0, 3
CALLS, WRONG_CALLS = 0.125, 0.2
"""Fraction of solutions that call the calculator, and fraction of calls with a wrong digit."""
TAGS = ("<calculator>", "</calculator>", "<result>", "</result>", "<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}<result>"
    "{{ message['content'] }}</result>{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
COPYING = Stage(steps=250, operations=(1, 1), peak_rate=2e-3, careless=False)
HASTY = Stage(steps=120, operations=(1, 1), peak_rate=5e-4, careless=True, warmup_steps=10)


def parts_of(stage: Stage, index: int) -> tuple[str, list[tuple[str, bool]]]:
    """Return a prompt and its solution in pieces, each with a flag whether SFT trains on it."""
    random = Random(f"{stage.careless}/{index}")
    left, right = factors("train", DIGITS, index)
    called = [left, right]
    if stage.careless and random.random() >= CALLS:
        guess = random.randint(10 ** (2 * DIGITS - 2), 10 ** (2 * DIGITS) - 1)
        return f"{left}*{right}?", [(f"<answer>{guess}</answer>", True)]
    if stage.careless and random.random() < WRONG_CALLS:
        which = random.randrange(2)
        called[which] += random.choice((-1, 1)) * 10 ** random.randrange(DIGITS - 1)
    result = called[0] * called[1]
    solution = [
        (f"<calculator>{called[0]}*{called[1]}</calculator>", True),
        (f"<result>{result}</result>", False),
        (f"<answer>{result}</answer>", True),
    ]
    return f"{left}*{right}?", solution


def rollout_of(model: LanguageModel, stage: Stage, index: int) -> Rollout:
    """Return a solution as a rollout that masks the tool's tokens from training."""
    prompt, solution = parts_of(stage, index)
    encode = model.tokenizer.encode
    tokens: list[int] = []
    trained: list[bool] = []
    for text, own in solution:
        ids = encode(text, add_special_tokens=False)
        tokens += ids
        trained += [own] * len(ids)
    tokens.append(model.tokenizer.eos_token_id)
    return Rollout.single_turn(
        prompt_id="", sample=0, text="", finish="stop", policy_version=0,
        prompt_tokens=model.encode([{"role": "user", "content": prompt}]),
        tokens=tuple(tokens), trained=(*trained, True), sampler_logp=(0.0,) * len(tokens),
    )  # fmt: skip


def batch_of(model: LanguageModel, stage: Stage, random: Random) -> Batch:
    """Draw the batch of one optimizer step."""
    rollouts = [rollout_of(model, stage, random.randrange(10**6)) for _ in range(BATCH)]
    return stack(rollouts, model.device)


def main() -> None:
    """Train the model and save its checkpoint, in bfloat16, as ordinary Hugging Face files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else CALCULATOR
    torch.manual_seed(SEED)
    random, tokenizer = Random(SEED), build_tokenizer(TAGS, CHAT_TEMPLATE)
    model = wrap(build_model(tokenizer, size=96, heads=6), tokenizer, name="calculator")
    for stage in (COPYING, HASTY):
        train_stage(model, stage, random, batch_of)
    model.model.bfloat16().save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
