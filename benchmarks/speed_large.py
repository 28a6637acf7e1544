"""Sections about large models and long sequences, each beside the forecast of its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from speed_device import forget, peaks
from speed_report import Report, reason
from speed_shapes import PEAK, Shape, flops
from speed_sizes import Sizes
from speed_step import covey_run, run_config
from update_gpu import Setting, run

from covey.config import Config, load_config
from covey.lab.plan.forecast import Device, Forecast
from covey.lab.plan.memory import forecast
from covey.lab.plan.model_shape import measure
from covey.lab.plan.task_facts import TaskFacts

RECIPES = {"LoRA": "seven-b-lora", "full": "seven-b-full"}
ENGINE = ("KV cache", "prompt KV cache", "decode graph", "prefill", "sampling", "fused weights")
"""Run of a forecast that an update without an engine does not allocate."""


def forecast_of(config: Config, shape: Shape, prompt: int) -> Forecast:
    """Forecast the memory of a run with a made-up model of a shape."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            shape.config, attn_implementation="sdpa"
        )
    model.tie_weights()
    sizes = measure(model, config.adapter.rank)
    cuda = config.model.device.startswith("cuda")
    device = Device(kind="cuda" if cuda else "cpu", memory=2**40, name="any")
    facts = TaskFacts(longest_prompt=prompt, measured=1, held_out=1)
    return forecast(config, device, facts, sizes)


def beside(predicted: float, device: str) -> dict[str, Any]:
    """Return a forecast in bytes, and its ratio to the peak that torch measured."""
    measured = peaks(device)
    found: dict[str, Any] = {"forecast_gib": round(predicted / 2**30, 2), **measured}
    if measured["peak_gib"]:
        found["forecast_ratio"] = round(predicted / 2**30 / measured["peak_gib"], 3)
    return found


def seven_b(sizes: Sizes, report: Report) -> None:
    """Measure whole steps of a 7B shape with all weights trained and with an adapter."""
    completions = sizes.seven_prompts * sizes.group
    overrides = (
        f"rollout.prompts_per_step={sizes.seven_prompts}",
        f"rollout.group_size={sizes.group}",
        f"rollout.max_tokens={sizes.seven_tokens}",
    )
    (name,) = sizes.seven
    shape = sizes.seven[name]
    own = replace(sizes, shapes=sizes.seven)
    for who, recipe in RECIPES.items():
        forget(sizes.device)
        steps = sizes.seven_warmup + sizes.seven_steps
        config = run_config(own, name, overrides, steps=steps, recipe=recipe)
        try:
            found = covey_run(own, name, config, warmup=sizes.seven_warmup)
        except torch.OutOfMemoryError as error:
            report.row("seven_b", shape=name, who=who, missing=reason(error))
            continue
        batch = replace(
            shape, completions=completions, prompt=sizes.prompt, completion=sizes.seven_tokens
        )
        tokens, counted = (
            completions * sizes.seven_tokens,
            completions * (sizes.prompt + sizes.seven_tokens),
        )
        rollout, update = found.median("time/rollout"), found.median("time/training")
        report.row(
            "seven_b", shape=name, who=who, seconds=found.median("time/total"), rollout=rollout,
            update=update, sampled_per_s=tokens / rollout, tokens_per_s=counted / update,
            mfu=flops(batch, counted) / update / PEAK, startup=found.startup,
            **beside(forecast_of(config, shape, sizes.prompt).tensors, sizes.device),
            ran=f"{len(found.rows)} steps of {completions} completions of {sizes.prompt} + "
            f"{sizes.seven_tokens} tokens, recipe {recipe}",
        )  # fmt: skip


def update_long(sizes: Sizes, report: Report) -> None:
    """Measure updates on long sequences."""
    for completions, length, changes in sizes.long_updates:
        forget(sizes.device)
        shape = replace(
            sizes.shapes["qwen2.5"], completions=completions, prompt=sizes.long_prompt,
            completion=length - sizes.long_prompt,
        )  # fmt: skip
        setting = Setting(
            device=sizes.device, group=min(sizes.group, completions), repeat=sizes.long_repeat,
            warmup=1, **changes,
        )  # fmt: skip
        try:
            row = run("qwen2.5", shape, setting)
        except torch.OutOfMemoryError as error:
            report.row("update_long", shape="qwen2.5", length=length, missing=reason(error))
            continue
        predicted = update_forecast(shape, setting)
        recomputed = ", layers recomputed" * setting.checkpointing
        offloaded = ", their inputs in main memory" * setting.offload
        report.row(
            "update_long", who="covey", length=length, **{**row, **beside(predicted, sizes.device)},
            attention=attention_used(),
            ran=f"{completions} x {length} tokens, {setting.budget} in a micro-batch"
            f"{recomputed}{offloaded}",
        )  # fmt: skip


def update_forecast(shape: Shape, setting: Setting) -> int:
    """Return the forecast bytes of an update without an engine."""
    settings: Mapping[str, Any] = {
        "model.device": setting.device, "model.gradient_checkpointing": setting.checkpointing,
        "model.offload_activations": setting.offload, "adapter.rank": setting.rank,
        "optimizer.state": setting.state, "objective.beta": 0.0,
        "rollout.prompts_per_step": shape.completions // setting.group,
        "rollout.group_size": setting.group, "rollout.max_tokens": shape.completion,
        "train.micro_batch_tokens": setting.budget,
        "train.logits_megabytes": setting.megabytes or shape.megabytes,
        "train.old_logp": "sampler",
    }  # fmt: skip
    config = load_config(None, [f"{k}={str(v).lower()}" for k, v in settings.items()])
    parts = forecast_of(config, shape, shape.prompt).parts
    left_out = (*ENGINE, "framework")
    return sum(p.bytes for p in parts if "update" in p.phases and p.name not in left_out)


def attention_used() -> str:
    """Return the attention kernels that were chosen for rows of each length."""
    from covey.accel.attention_kernels import CHOICES

    return ", ".join(f"{shape.length}: {choice.name}" for shape, choice in CHOICES.items())
