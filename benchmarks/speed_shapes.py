"""Models of published shapes with random weights, and their bytes and flops by arithmetic."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tokenizers
import torch
import transformers

from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Sampling
from covey.rollout.episode import EncodedPrompt, generate
from covey.types import Prompt, Rollout

PEAK = 989e12
"""Dense bfloat16 flops a second of an H100 or H200, by its data sheet."""


@dataclass(frozen=True)
class Shape:
    """A model, and the batch that its update is measured with."""

    config: Any
    completions: int
    prompt: int
    completion: int
    budgets: tuple[int, int]
    """Packed tokens of a micro-batch, without checkpointing and with it."""
    megabytes: float = 512.0
    """For logits."""

    @property
    def key_numbers(self) -> int:
        """Numbers in the keys and values of one token, all layers together."""
        config = self.config
        return int(2 * config.num_hidden_layers * config.num_key_value_heads * self.head_size)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return int(self.config.hidden_size // self.config.num_attention_heads)


def shapes() -> dict[str, Shape]:
    """SmolLM2-135M and Qwen2.5-1.5B."""
    return {
        "smollm2": Shape(
            transformers.LlamaConfig(
                vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9,
                num_key_value_heads=3, intermediate_size=1536, max_position_embeddings=8192,
                tie_word_embeddings=True, rms_norm_eps=1e-5,
            ),
            # One micro-batch, whose logits are not computed again.
            completions=128, prompt=128, completion=256, budgets=(36_864, 36_864),
            megabytes=12_288.0,
        ),
        "qwen2.5": Shape(
            transformers.Qwen2Config(
                vocab_size=151936, hidden_size=1536, num_hidden_layers=28, num_attention_heads=12,
                num_key_value_heads=2, intermediate_size=8960, max_position_embeddings=32768,
                tie_word_embeddings=True,
            ),
            completions=32, prompt=256, completion=768, budgets=(4_096, 8_192),
        ),
    }  # fmt: skip


def seven_billion() -> dict[str, Shape]:
    """Qwen2.5-7B; the batch of its steps is that of its recipes."""
    config = transformers.Qwen2Config(
        vocab_size=152064, hidden_size=3584, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, intermediate_size=18944, max_position_embeddings=32768,
        tie_word_embeddings=False,
    )  # fmt: skip
    return {
        "qwen2.5-7b": Shape(
            config, completions=64, prompt=128, completion=512, budgets=(8_192, 8_192)
        )
    }


def tiny_shapes() -> dict[str, Shape]:
    """The same families, small enough for a CPU and a test."""
    small = {
        "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }  # fmt: skip
    tiny = partial(Shape, completions=16, prompt=8, completion=16, budgets=(256, 256))
    return {
        "smollm2": tiny(transformers.LlamaConfig(**small)),
        "qwen2.5": tiny(transformers.Qwen2Config(**small)),
    }


def random_model(
    config: Any, *, dtype: torch.dtype, device: str, stops: bool = False, scale: float = 1.0
) -> Any:
    """Return a model with the same random weights each time, its own attention being sdpa.

    It never generates a stop token, unless `stops` makes token 1 one. `scale` multiplies all
    weights, which makes the distribution more peaked.
    """
    torch.manual_seed(0)
    own = copy.deepcopy(config)  # wrapping a model changes its config's attention
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            own, dtype=dtype, attn_implementation="sdpa"
        )
    model.tie_weights()
    if scale != 1.0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
    end = 1 if stops else config.vocab_size
    for settings in (model.config, model.generation_config):
        settings.eos_token_id, settings.pad_token_id, settings.bos_token_id = end, 0, None
    return model.eval()


def word_tokenizer(vocabulary: int, *, stops: bool = False) -> Any:
    """Return a tokenizer of words w1, w2, ..., one token each; the last one is the stop token.

    Both sides then have text to encode, decode and score, and prompts have an exact length. Tokens
    are byte-level, as in the tokenizers of the real models. The stop token lies outside the
    model's vocabulary, unless `stops`.
    """
    special = {0: "<pad>", 1 if stops else vocabulary: "<end>"}
    words = {special.get(n, f"\u0120w{n}"): n for n in range(vocabulary + 1)}  # a space's byte
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(" ", "merged_with_next"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    )
    plain.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, padding_side="left", eos_token="<end>", pad_token="<pad>"
    )


def prompt_text(number: int, *, words: int, vocabulary: int) -> str:
    """Return the text of prompt `number`; the same on every call."""
    draw = random.Random(number)
    return " ".join(f"w{draw.randrange(2, vocabulary)}" for _ in range(words))


def encoded_prompts(count: int, *, words: int, vocabulary: int) -> list[EncodedPrompt]:
    """Return prompts with their tokens."""
    texts = [prompt_text(number, words=words, vocabulary=vocabulary) for number in range(count)]
    return [
        EncodedPrompt(
            prompt=Prompt(id=str(number), task="words", messages=(), target=""),
            tokens=tuple(int(word[1:]) for word in text.split()),
        )
        for number, text in enumerate(texts)
    ]


def rollouts_of(
    engine: NativeEngine, prompts: Sequence[EncodedPrompt], *, step: int, sampling: Sampling
) -> list[list[Rollout]]:
    """Generate a group for each prompt."""
    groups = generate(prompts, engine=engine, model=engine.model, sampling=sampling, step=step)
    return [list(group.rollouts) for group in groups]


def step_bytes(
    shape: Shape,
    weights: int,
    *,
    completions: int,
    group: int,
    prompt: int,
    written: int,
    size: int = 2,
) -> int:
    """Return the bytes that a decode step must read: all weights, keys and values, once.

    A group shares its prompt's keys; a number has `size` bytes. The tied embedding is the head, so
    it is read.
    """
    return weights + size * shape.key_numbers * (
        completions // group * prompt + completions * written
    )


def flops(shape: Shape, tokens: int, *, shared: float | None = None) -> float:
    """Return the flops of one update: three times the forward pass.

    `shared`: completions per processed prompt; the head then runs on completion tokens only. None:
    the prompt is processed for every completion, and the head runs on all tokens.
    """
    config = shape.config
    size, heads = shape.head_size, config.num_attention_heads
    keys = config.num_key_value_heads
    layer = config.hidden_size * (size * (2 * heads + 2 * keys) + 3 * config.intermediate_size)
    trained = shape.completions * shape.completion
    length = shape.prompt + shape.completion
    pairs = length**2 / 2 - (1 - 1 / (shared or 1)) * shape.prompt**2 / 2
    attention = 4 * shape.completions * pairs * heads * size * config.num_hidden_layers
    head = 2 * config.vocab_size * config.hidden_size * (tokens if shared is None else trained)
    return float(3 * (2 * layer * config.num_hidden_layers * tokens + head + attention))
