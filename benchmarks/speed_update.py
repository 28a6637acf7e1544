"""The section about updates: covey's, and a plain one with transformers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from speed_device import forget, peaks, seconds_of
from speed_report import Report, reason
from speed_shapes import PEAK, Shape, flops, random_model
from speed_sizes import Sizes
from update_gpu import Setting, run

PLAIN_PROMPT, PLAIN_COMPLETION = 128, 256
"""Tokens of the plain update's sequences, whatever covey's batch has."""


def update(sizes: Sizes, report: Report) -> None:
    """Measure tokens per second, MFU and peak memory of updates."""
    for name, shape in sizes.shapes.items():
        own = None
        for changes in sizes.updates[name]:
            found = _covey(sizes, report, name, shape, changes)
            own = own or found
            forget(sizes.device)
        about = {"shape": name, "who": "plain transformers"}
        cuda = sizes.device.startswith("cuda")
        plain = replace(
            shape, completions=sizes.plain_rows[name],
            prompt=PLAIN_PROMPT if cuda else sizes.prompt,
            completion=PLAIN_COMPLETION if cuda else sizes.tokens,
        )  # fmt: skip
        try:
            row = plain_update(plain, sizes)
            report.row("update", **about, **row, ratio=own / row["tokens_per_s"] if own else None)
        except Exception as error:  # it may not fit into memory
            report.row("update", **about, missing=reason(error))


def _covey(
    sizes: Sizes, report: Report, name: str, shape: Shape, changes: Mapping[str, Any]
) -> float | None:
    """Measure covey's update."""
    setting = Setting(device=sizes.device, group=sizes.group, repeat=sizes.repeat, **changes)
    try:
        row = run(name, shape, setting)
    except Exception as error:
        report.row("update", shape=name, who="covey", missing=reason(error))
        return None
    ran = (
        f"{shape.completions} x {shape.prompt + shape.completion} tokens, groups of {setting.group}"
    )
    ran += f", {row['micro_batches']} micro-batches"
    ran += ", activations recomputed" if setting.checkpointing else ""
    ran += ", layer inputs in main memory" if setting.offload else ""
    ran += f", LoRA of rank {setting.rank}" if setting.rank else ""
    ran += f", {setting.state} state"
    report.row("update", who="covey", **row, ran=ran)
    return float(row["tokens_per_s"])


def plain_update(shape: Shape, sizes: Sizes) -> dict[str, Any]:
    """Time forward, log-softmax over all logits, backward, and AdamW without master weights."""
    model = random_model(shape.config, dtype=sizes.dtype, device=sizes.device).train()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    length = shape.prompt + shape.completion
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(2, shape.config.vocab_size, (shape.completions, length), generator=draw)
    ids = ids.to(sizes.device)

    def once() -> None:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        logp = logits.float().log_softmax(dim=-1).gather(-1, ids[:, 1:, None])
        (-logp[:, shape.prompt - 1 :].mean()).backward()
        adamw.step()
        adamw.zero_grad()

    once()
    once()
    times = [seconds_of(once, sizes.device) for _ in range(sizes.repeat)]
    seconds, tokens = statistics.median(times), shape.completions * length
    return {
        "seconds": seconds,
        "fastest": min(times),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "mfu": flops(shape, tokens) / seconds / PEAK,
        **peaks(sizes.device),
        "ran": f"{shape.completions} x {length} tokens, no master weights, no clipping",
    }
