"""Sections about start-up time and numerical agreement."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from speed_device import forget, synchronize
from speed_report import Report, reason
from speed_sampler import prompts_for, sampling_of, tokens_in
from speed_shapes import encoded_prompts, random_model, rollouts_of, tiny_shapes, word_tokenizer
from speed_sizes import Sizes
from update_gpu import Setting, policy_for

from covey.collate import collate
from covey.engines.draw import Distribution
from covey.engines.native.backend import DecodeBackend
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Sampling
from covey.models.load_model import wrap
from covey.objective import ALGORITHMS, with_advantage
from covey.policy.policy import Policy
from covey.run import Run
from covey.step import Observer, Seen, StepSettings, optimize
from covey.types import Batch, Group

SHARP = 3.0
"""Factor on random weights: the distribution over tokens becomes peaked."""
UPDATES = 3
"""Updates after which recurring passes have been captured as CUDA graphs."""


class Enough(Exception):
    """Raised after the first tokens, to end generation."""


def first_rollout(sizes: Sizes, name: str) -> dict[str, float]:
    """Time from a loaded model to its first tokens; runs in a worker process."""
    config = sizes.shapes[name].config
    model = random_model(config, dtype=sizes.dtype, device=sizes.device)
    tokenizer = word_tokenizer(config.vocab_size)
    completions = sizes.startup_completions
    synchronize(sizes.device)
    started = time.perf_counter()
    sampler = NativeEngine(wrap(model, tokenizer, name))
    ready = time.perf_counter()
    kind, advance = type(sampler.backend), sampler.backend.advance
    moments: list[float] = []

    def first_step(backend: DecodeBackend, *arguments: Any) -> None:
        synchronize(sizes.device)
        moments.append(time.perf_counter())
        advance(*arguments)
        synchronize(sizes.device)
        moments.append(time.perf_counter())
        raise Enough

    prompts = prompts_for(sizes, sampler.model, completions)
    with suppress(Enough), mock.patch.object(kind, "advance", first_step):
        rollouts_of(sampler, prompts, step=0, sampling=sampling_of(sizes, completions))
    begun, ended = moments
    return {
        "ready_s": ready - started,
        "first_token_s": begun - started,
        "first_graph_s": ended - started,
    }


def startup(sizes: Sizes, report: Report, own_process: Callable[..., Any]) -> None:
    """From a loaded model to the first tokens, without compiled kernels and with them."""
    forget(sizes.device)
    for name in sizes.shapes:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                about = {"shape": name, "cache": state, "completions": sizes.startup_completions}
                try:
                    found = own_process(f"startup {name}", {"TRITON_CACHE_DIR": cache})
                except Exception as error:
                    report.row("startup", **about, missing=reason(error))
                    continue
                report.row("startup", **about, **found, ran="a process of its own")


def numerics(sizes: Sizes, report: Report) -> None:
    """Does the sampler say what the trainer says, and what transformers says?"""
    for dtype in {sizes.dtype: None, torch.float32: None}:
        for scale in (1.0, SHARP):
            forget(sizes.device)
            report.row("numerics", shape="smollm2", **_sampler_and_trainer(sizes, dtype, scale))
    for name, config in (
        ("tiny", tiny_shapes()["smollm2"].config),
        ("smollm2", sizes.shapes["smollm2"].config),
    ):
        forget(sizes.device)
        report.row("numerics", shape=name, **_greedy(sizes, config))


def _sampler_and_trainer(sizes: Sizes, dtype: torch.dtype, scale: float) -> dict[str, Any]:
    """Compare the engine's log-probs of sampled tokens with the trainer's in real updates."""
    shape = sizes.shapes["smollm2"]
    model = random_model(shape.config, dtype=dtype, device=sizes.device, scale=scale)
    policy = policy_for(model, Setting(device=sizes.device, megabytes=512.0))
    prompts = prompts_for(sizes, policy.model, sizes.logp_completions)
    found = rollouts_of(
        NativeEngine(policy.model),
        prompts,
        step=0,
        sampling=sampling_of(sizes, sizes.logp_completions),
    )
    groups = [
        Group(
            prompt=prompt.prompt,
            rollouts=tuple(replace(one, reward=float(one.sample % 2)) for one in rollouts),
        )
        for prompt, rollouts in zip(prompts, found, strict=True)
    ]
    seen = _watched_updates(policy, collate(groups, sizes.device), shape.budgets[0])
    return {
        "who": "sampler_logp and logp" + (", sharp" if scale != 1.0 else ""),
        "dtype": str(dtype).removeprefix("torch."),
        "completions": sizes.logp_completions,
        "tokens": tokens_in(found),
        "recorded": len(policy.passes.captured()) if policy.passes is not None else 0,
        **seen,
    }


def _watched_updates(policy: Policy, batch: Batch, budget: int) -> dict[str, float]:
    """Run updates with learning rate 0 and return the log-prob differences of the last one."""
    objective = ALGORITHMS["grpo"](beta=0.0)
    settings = StepSettings(
        mini_batches=1,
        epochs=1,
        micro_batch_tokens=budget,
        old_logp_from_sampler=True,
        learning_rate=lambda *_: 0.0,
        seed=0,
    )
    batch = with_advantage(objective, batch)
    differences: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []

    class Watch(Observer):
        def seen(self, one: Seen) -> None:
            mask = one.micro.mask
            differences.append((one.micro.sampler_logp - one.now.logp)[mask].abs())
            entropies.append(one.now.entropy[mask].clone())

    for _ in range(UPDATES):
        differences.clear()
        entropies.clear()
        optimize(
            Run(policy=policy, objective=objective, settings=settings),
            batch,
            step=0,
            observer=Watch(),
        )
    difference = torch.cat(differences)
    assert len(difference) == int(batch.mask.sum()), "each token must be seen once"
    return {
        "mean": float(difference.mean()),
        "largest": float(difference.max()),
        "entropy": float(torch.cat(entropies).mean()),
    }


@torch.inference_mode()
def _greedy(sizes: Sizes, config: Any) -> dict[str, Any]:
    """Compare greedy completions in float32 with those of `generate`, one per prompt."""
    completions, new = sizes.greedy_completions, sizes.greedy_tokens
    random = partial(random_model, config, dtype=torch.float32, device=sizes.device, scale=SHARP)
    prompts = encoded_prompts(completions, words=sizes.prompt, vocabulary=config.vocab_size)
    ids = torch.tensor([prompt.tokens for prompt in prompts], device=sizes.device)
    theirs = random().generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new,
        eos_token_id=None, pad_token_id=0,
    )[:, ids.shape[1] :]  # fmt: skip
    sampler = NativeEngine(wrap(random(), word_tokenizer(config.vocab_size), "greedy"))
    greedy = Sampling(
        max_tokens=new, max_concurrent=completions, distribution=Distribution(temperature=0.0)
    )
    found = rollouts_of(sampler, prompts, step=0, sampling=greedy)
    pairs = list(zip(found, theirs.tolist(), strict=True))
    return {
        "who": "greedy text and `generate`",
        "dtype": "float32",
        "completions": completions,
        "tokens": tokens_in(found),
        "distinct": len({token for _, row in pairs for token in row}),
        "differ": sum(list(mine[0].tokens) != row for mine, row in pairs),
    }
