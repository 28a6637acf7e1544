"""Section about float8 rollouts: a model of 7B parameters in each precision of the engine."""

from __future__ import annotations

import statistics

import torch
from speed_device import forget, peaks, seconds_of
from speed_report import Report
from speed_sampler import step_seconds, timed
from speed_shapes import random_model, step_bytes, word_tokenizer
from speed_sizes import Sizes

from covey.engines.native.backend import MODEL_PRECISION, Precision
from covey.engines.native.engine import NativeEngine
from covey.models.load_model import wrap

PRECISIONS = {
    "model": MODEL_PRECISION,
    "float8": Precision(products=True),
    "float8, KV cache too": Precision(products=True, cache=True),
}


@torch.inference_mode()
def float8(sizes: Sizes, report: Report) -> None:
    """Measure tokens per second, a decode step and its floor, and the time of quantization."""
    bandwidth = report.environment["copy_bytes_per_s"]
    ((name, shape),) = sizes.seven.items()
    config = shape.config
    model = random_model(config, dtype=sizes.dtype, device=sizes.device)
    wrapped = wrap(model, word_tokenizer(config.vocab_size), name)
    embedding = model.get_input_embeddings().weight.nbytes  # a step reads few of its rows
    for label, precision in PRECISIONS.items():
        forget(sizes.device)
        engine = NativeEngine(wrapped, precision)
        layers = sum(p.nbytes for p in model.model.layers.parameters())
        weights = sum(p.nbytes for p in model.parameters())
        weights -= 0 if config.tie_word_embeddings else embedding
        weights -= layers - layers // sizes.dtype.itemsize if precision.products else 0
        for completions in sizes.float8:
            found = timed(engine, sizes, completions, sizes.repeat)
            least = step_bytes(
                shape, weights, completions=completions, group=sizes.group, prompt=sizes.prompt,
                written=sizes.tokens // 2, size=1 if precision.cache else sizes.dtype.itemsize,
            )  # fmt: skip
            step, floor = step_seconds(engine, sizes, completions), least / bandwidth
            refreshes = [seconds_of(engine.backend.refresh, sizes.device) for _ in range(5)]
            report.row(
                "float8", shape=name, completions=completions, who=label, **found.speed(),
                step_ms=1e3 * step, floor_ms=1e3 * floor, times_floor=step / floor,
                refresh_ms=1e3 * statistics.median(refreshes), seconds=list(found.seconds),
                tokens=found.tokens, **peaks(sizes.device),
                ran=f"{sizes.repeat} x {sizes.tokens} tokens",
            )  # fmt: skip
        del engine
