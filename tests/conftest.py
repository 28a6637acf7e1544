"""Shared pieces: small real models, and batches of rollouts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Generator, Mapping, Sequence
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
from covey.garbage import freeze_garbage_collector
from covey.lab.rewards import checks
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model, wrap
from covey.rollout.episode import EncodedPrompt, generate
from covey.sandbox.program import isolation_problem
from covey.types import Batch, Rollout
from tests import interpreted
from tests.processes import FORKED_WORKERS

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


# The lab measures throughput until this time is over, however little there is to score.
checks.THROUGHPUT_SECONDS = 0.1

UNISOLATED = "programs cannot be isolated on this machine"
NO_SANDBOX = isolation_problem()
"""Why this machine has no sandbox, found before any test pretends so; empty if it has one."""


def pytest_configure() -> None:
    """Make Triton's interpreter faster, where kernels are interpreted."""
    if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        interpreted.speed_up()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, Any]:
    """Skip a test that failed because this machine has no sandbox, with the sandbox's reason."""
    report = yield
    shown = f"{report.longreprtext}{report.capstdout}{report.capstderr}"
    if report.failed and UNISOLATED in shown and NO_SANDBOX:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.reportinfo()[1] or 0, f"no sandbox: {NO_SANDBOX}")
    return report


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


@pytest.fixture
def _forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes of pools and engines be forks of this process, which start at once."""
    monkeypatch.setattr("covey.subprocesses.subprocess", FORKED_WORKERS)


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
