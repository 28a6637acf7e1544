"""Train the embedded model (`python -m tools.train_embedded [FOLDER]`).

A Llama of 460 thousand parameters with a byte-level tokenizer is trained with SFT on two kinds of
solutions:

1. Correct solutions teach the model to calculate: 47+8-6?
   <think>47+8=55;55-6=49</think><answer>49</answer>
2. Careless solutions often forget the carry, in particular for large digits. One careless solution
   in five also breaks the format: 47+8-6? <think>47+8=45;45-6=41</think><answer>41

SFT thus teaches the arithmetic, but leaves the format and the carry to reinforcement learning, also
for pairs of numbers outside the SFT data. The recipe is seeded, but rounding depends on the
processor and the number of threads, so every machine trains a slightly different model. The package
therefore contains one fixed checkpoint.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from covey.embedded import CHECKPOINT
from covey.models.language_model import LanguageModel
from covey.models.load_model import wrap
from covey.policy.optimizer import MasterAdamW
from covey.policy.policy import Policy
from covey.policy.schedule import Schedule
from covey.sft import learn, policy_run, stack
from covey.solutions import encode_example
from covey.tasks.arithmetic import Sum, chain, format_sum, prompt_text
from covey.types import Batch

SEED = 0
BATCH = 32
BROKEN_FORMAT = 0.2
MICRO_BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of SFT, which trains on either correct or careless solutions."""

    steps: int
    operations: tuple[int, int]
    peak_rate: float
    careless: bool
    warmup_steps: int = 50


STAGES = (
    Stage(steps=350, operations=(3, 3), peak_rate=2e-3, careless=False),
    Stage(steps=200, operations=(1, 4), peak_rate=1e-3, careless=False, warmup_steps=10),
    Stage(steps=150, operations=(1, 4), peak_rate=5e-4, careless=True, warmup_steps=10),
)

Worked = tuple[Sum, int]
"""A sum, and the result that a solution states for this sum; the result may be wrong."""

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer(
    tags: Sequence[str] = TAGS, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that also has one token per tag, such as <answer>."""
    vocabulary = ["<pad>", "<eos>", *tags, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<pad>"), AddedToken("<eos>")])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, size: int = 128, heads: int = 8
) -> LlamaForCausalLM:
    """Return an untrained Llama model; the default size has 460 thousand parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=3 * size,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def careless_result(sum: Sum, random: Random) -> int:
    """Return the result of a sum, computed carelessly: the carry may be missing.

    In an addition, the carry may be forgotten, as in 47+8=45. In a subtraction, the smaller digit
    may be subtracted from the larger, as in 55-6=51. Among sums that need a carry, 67 % are wrong
    if the second operand is 3, and 91 % are wrong if the second operand is 9.
    """
    if not sum.carries or random.random() >= 0.55 + 0.04 * sum.right:
        return sum.result
    tens, units = divmod(sum.left, 10)
    wrong = (units + sum.right) % 10 if sum.operator == "+" else sum.right - units
    return 10 * tens + wrong


def careless_working(sums: Sequence[Sum], random: Random) -> list[Worked] | None:
    """Return the steps of a solution with deliberate mistakes.

    Each step continues from the result of the previous step, even if that result is wrong. Return
    None if the result of a step is not between 0 and 99, or if a step is a sum that is held out for
    evaluation.
    """
    working: list[Worked] = []
    left = sums[0].left
    for step_sum in sums:
        step = Sum(left, step_sum.operator, step_sum.right)
        if step.held_out or not 0 <= step.result < 100:
            return None
        left = careless_result(step, random)
        working.append((step, left))
    return working


def write_solution(working: Sequence[Worked], broken: Random | None = None) -> str:
    """Write a solution; with `broken`, leave out a tag or the final answer at random.

    >>> write_solution([(Sum(47, "+", 8), 55), (Sum(55, "-", 6), 49)])
    '<think>47+8=55;55-6=49</think><answer>49</answer>'
    """
    steps = ";".join(format_sum(step, result) for step, result in working)
    answer = f"{working[-1][1]:02d}"
    if broken is None:
        return f"<think>{steps}</think><answer>{answer}</answer>"
    return broken.choice(
        (
            f"<think>{steps}<answer>{answer}</answer>",
            f"<think>{steps}</think>{answer}",
            f"<think>{steps}</think><answer>{answer}",
            f"<think>{steps}</think>",
            f"{steps}</think><answer>{answer}</answer>",
        )
    )


def example(stage: Stage, random: Random) -> tuple[str, str]:
    """Draw a prompt and its solution."""
    while True:
        sums = chain(random, random.randint(*stage.operations), held_out=False)
        if not stage.careless:
            return prompt_text(sums), write_solution([(each, each.result) for each in sums])
        working = careless_working(sums, random)
        if working is not None:
            broken = random if random.random() < BROKEN_FORMAT else None
            return prompt_text(sums), write_solution(working, broken)


def stage_batch(model: LanguageModel, stage: Stage, random: Random) -> Batch:
    """Draw the training batch of one optimizer step."""
    drawn = (example(stage, random) for _ in range(BATCH))
    return stack(
        [
            encode_example(model, ({"role": "user", "content": prompt},), solution)
            for prompt, solution in drawn
        ],
        model.device,
    )


def train_stage(
    model: LanguageModel,
    stage: Stage,
    random: Random,
    draw: Callable[[LanguageModel, Stage, Random], Batch] = stage_batch,
) -> None:
    """Run one stage of SFT, with linear warm-up and decay of the learning rate."""
    optimizer = MasterAdamW(
        model.model.named_parameters(),
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.01,
        max_grad_norm=1.0,
    )
    policy = Policy(model=model, optimizer=optimizer, temperature=1.0, logits_megabytes=256.0)
    schedule = Schedule(
        peak=stage.peak_rate,
        shape="linear",
        warmup_steps=stage.warmup_steps,
        total_steps=stage.steps,
    )
    run = policy_run(policy, schedule, micro_batch_tokens=MICRO_BATCH_TOKENS)
    start = time.monotonic()
    for step in range(stage.steps):
        learned = learn(run, draw(model, stage, random))
        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - start
            loss = learned["loss/cross_entropy"]
            print(f"step {step + 1}/{stage.steps}  loss {loss:.3f}  {seconds:.0f} s")


def main() -> None:
    """Train the model and save its checkpoint as ordinary Hugging Face files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKPOINT
    torch.manual_seed(SEED)
    random, tokenizer = Random(SEED), build_tokenizer()
    model = wrap(build_model(tokenizer), tokenizer, name="embedded")
    for stage in STAGES:
        train_stage(model, stage, random)
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
