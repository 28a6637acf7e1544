"""Shared pieces: small real models, and batches of rollouts."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hypothesis
import pytest

# Tests run side by side, one to a core; so do the processes that they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    # Kernels are then interpreted. Triton asks when it is imported, which transformers does.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import transformers

from covey.embedded import CHECKPOINT
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Sampling
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model, wrap
from covey.rollout.episode import EncodedPrompt, generate
from covey.training.garbage import freeze_garbage_collector
from covey.types import Batch, Rollout

# Modules that tests write, or that stand among them, and name in configurations.
os.environ["COVEY_TRUST"] = (
    "tests,judged,mine,my_algorithms,my_own_tasks,my_rewards,own_module,own_package,own_shown"
)

# Slow machines are no failure, and a failure must come back when the test is run again.
hypothesis.settings.register_profile("covey", deadline=None, derandomize=True)
hypothesis.settings.load_profile("covey")
torch.set_num_threads(1)

# Files are synchronized for the case of a power cut, which no test has; a run of three steps waits
# for the disk 66 times, as long as it computes.
os.fsync = lambda handle: None  # type: ignore[assignment]


def pytest_configure() -> None:
    """Let Triton's interpreter do once what it does in every call, which takes a fifth of its time.

    It looks up the names of its language, patches them again in every function that a kernel calls,
    and makes a table of all types to look up one.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    tl, is_builtin = interpreter.tl, interpreter.tl.core.is_builtin
    patch_all, find_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    names: dict[Any, list[str]] = {}
    dtypes: dict[Any, Any] = {}

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [n for n, m in inspect.getmembers(package) if is_builtin(m)]
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    def patch_once(function: Any) -> Any:
        scope = function.__globals__.values()
        seen = [value for value in scope if value is tl or value is tl.core]
        left = any(is_builtin(package.load) for package in seen)
        return patch_all(function) if left else interpreter._LangPatchScope()

    def np_dtype(kind: Any) -> Any:
        element = kind.scalar
        if isinstance(element, tl.pointer_type):
            return find_dtype(element)
        if element not in dtypes:
            dtypes[element] = find_dtype(element)
        return dtypes[element]

    interpreter._patch_builtin = patch
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = np_dtype
    _round_float8(interpreter)


def _round_float8(interpreter: Any) -> None:
    """Let Triton's interpreter carry into the exponent when it rounds a float8 number up."""
    convert = interpreter._convert_float

    def rounded(values: Any, kind: Any, wanted: Any, mode: Any) -> Any:
        if wanted != interpreter.tl.float8e4nv or kind != interpreter.tl.float32:
            return convert(values, kind, wanted, mode)
        numbers = torch.from_numpy(values.astype("float32")).to(torch.float8_e4m3fn)
        return numbers.view(torch.uint8).numpy()

    interpreter._convert_float = rounded


FROZEN = contextlib.ExitStack()


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of every garbage collection: they stay to the end."""
    FROZEN.enter_context(freeze_garbage_collector())


def pytest_unconfigure() -> None:
    """Let the interpreter free everything at its end; nanobind reports what is left as leaks."""
    FROZEN.close()


@pytest.fixture(scope="session")
def embedded() -> LanguageModel:
    """The embedded model. Tests must not change its weights."""
    return load_language_model("embedded", device="cpu")


def rollouts_of(
    engine: NativeEngine, prompts: Sequence[EncodedPrompt], *, step: int, sampling: Sampling
) -> list[list[Rollout]]:
    """Generate a group for each prompt."""
    groups = generate(prompts, engine=engine, model=engine.model, sampling=sampling, step=step)
    return [list(group.rollouts) for group in groups]


ARCHITECTURES = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=262, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=64, max_position_embeddings=256,
        )
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=262, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=64, max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=262, n_embd=32, n_layer=2, n_head=4, n_positions=256,
            resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
        )
    ),
    # Sliding windows shorter than the answers: in every layer, in some, and with soft-capped logits.
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(
            vocab_size=262, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=64, sliding_window=5,
            max_position_embeddings=256,
        )
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            vocab_size=262, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, intermediate_size=64, sliding_window=5,
            max_position_embeddings=256, layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            vocab_size=262, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, intermediate_size=64, sliding_window=7,
            max_position_embeddings=256, attn_implementation="eager",
        )
    ),
}  # fmt: skip


def build(
    name: str,
    dtype: torch.dtype = torch.float32,
    kinds: Mapping[str, Callable[[], Any]] = ARCHITECTURES,
    device: str = "cpu",
) -> LanguageModel:
    """Return a small random model of an architecture, with the embedded tokenizer."""
    torch.manual_seed(len(name))
    model = kinds[name]()
    # Fresh weights are nearly uniform over the vocabulary; sharper ones make a stricter test.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    model.generation_config.bos_token_id = None
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    return wrap(model.to(device, dtype).eval(), tokenizer, name)


def make_batch(
    *, rows: int = 6, longest: int = 9, vocabulary: int = 262, groups: int = 2, seed: int = 0
) -> Batch:
    """Return a random batch with ragged prompts and completions, one token of them untrained."""
    generator = torch.Generator().manual_seed(seed)
    integers = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator)  # noqa: E731
    prompt_lengths, lengths = integers(2, 8, rows), integers(1, longest + 1, rows)
    lengths[0] = longest
    columns = torch.arange(longest)
    mask = columns < lengths[:, None]
    mask[0, longest // 2] = False
    prompt_columns = torch.arange(int(prompt_lengths.max()))
    return Batch(
        prompt_tokens=integers(6, vocabulary, rows, len(prompt_columns)).where(
            prompt_columns < prompt_lengths[:, None], 0
        ),
        prompt_lengths=prompt_lengths,
        tokens=integers(6, vocabulary, rows, longest).where(columns < lengths[:, None], 0),
        lengths=lengths,
        mask=mask,
        sampler_logp=-torch.rand(rows, longest, generator=generator),
        rewards=torch.rand(rows, generator=generator, dtype=torch.float64).round(decimals=1),
        success=integers(0, 2, rows).bool(),
        group=torch.arange(rows) % groups,
        truncated=torch.zeros(rows, dtype=torch.bool),
    )
