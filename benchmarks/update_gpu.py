"""Speed and memory of an update on a GPU: covey/step.py on synthetic rollouts.

    python benchmarks/update_gpu.py --out update.json            # both shapes, all settings
    python benchmarks/update_gpu.py --shape smollm2 --profile    # and where the time goes
    python benchmarks/update_gpu.py --shape smollm2 --checkpointing no --graphs both

With graphs, `replays` gives the device time of each captured pass, forward and backward; the rest
of an update is Python and the optimizer. `peak` is torch's peak of allocated memory, reached while
graphs are captured; `reserved` is what a device must have.

Weights are random and nothing is downloaded. Tokens are counted as completions x (prompt +
completion), as if the prompt were processed for every completion; `packed` is the number that the
model processes. MFU counts 6 flops per weight and token, and attention: `mfu` over the counted
tokens, `work` over the processed ones, both without recomputation.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from speed_device import event_seconds, forget, peaks, seconds_of
from speed_shapes import PEAK, Shape, flops, random_model, shapes, word_tokenizer

from covey.accel.activation_offload import checkpoint_layers
from covey.models.adapter import add_adapter
from covey.models.load_model import wrap
from covey.objective import ALGORITHMS, with_advantage
from covey.parallel.passes import micro_batches
from covey.policy.optimizer import CompactAdamW, MasterAdamW
from covey.policy.policy import Policy
from covey.run import Run
from covey.step import StepSettings, optimize
from covey.types import Batch


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Options of one measured update."""

    device: str = "cuda"
    checkpointing: bool = False
    offload: bool = False
    """Keep the inputs of checkpointed layers in main memory."""
    rank: int = 0
    """Of a LoRA adapter; 0: all weights are trained."""
    graphs: bool = True
    budget: int = 0
    """Packed tokens of a micro-batch; 0: the shape's own."""
    megabytes: float = 0.0
    """For logits; 0: the shape's own."""
    group: int = 8
    repeat: int = 7
    warmup: int = 3
    """Updates that are not timed; graphs of rare sizes are captured in the third."""
    profile: bool = False
    state: str = "float32"
    """Of the optimizer, or "compact"."""

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 on a GPU; float32 on a CPU, for trials."""
        return torch.bfloat16 if self.device.startswith("cuda") else torch.float32


def make_policy(config: Any, setting: Setting) -> Policy:
    model = random_model(config, dtype=setting.dtype, device=setting.device)
    if setting.checkpointing:
        checkpoint_layers(model, offload=setting.offload)
    return policy_for(model, setting)


def policy_for(model: Any, setting: Setting) -> Policy:
    """Give a model its tokenizer and its optimizer."""
    whole = wrap(model, word_tokenizer(model.config.vocab_size), "made up")
    kind = partial(CompactAdamW, seed=0) if setting.state == "compact" else MasterAdamW
    if setting.rank:
        whole = add_adapter(whole, rank=setting.rank)
    optimizer = kind(
        model.named_parameters(), betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0
    )
    return Policy(
        model=whole,
        optimizer=optimizer,
        temperature=1.0,
        logits_megabytes=setting.megabytes,
        graphs=setting.graphs,
    )


def make_batch(shape: Shape, group: int, device: str) -> Batch:
    generator = torch.Generator().manual_seed(0)
    groups, rows = shape.completions // group, shape.completions
    top = shape.config.vocab_size
    prompts = torch.randint(2, top, (groups, shape.prompt), generator=generator)
    mask = torch.ones(rows, shape.completion, dtype=torch.bool)
    return Batch(
        prompt_tokens=prompts.repeat_interleave(group, 0),
        prompt_lengths=torch.full((rows,), shape.prompt),
        tokens=torch.randint(2, top, mask.shape, generator=generator),
        lengths=torch.full((rows,), shape.completion),
        mask=mask,
        sampler_logp=torch.full(mask.shape, -10.0),
        rewards=torch.rand(rows, generator=generator, dtype=torch.float64).round(),
        success=torch.zeros(rows, dtype=torch.bool),
        group=torch.arange(groups).repeat_interleave(group),
        truncated=torch.zeros(rows, dtype=torch.bool),
    ).to(device)


def readings(batch: Batch, budget: int) -> int:
    """Count processed prompts: one per micro-batch and group in it."""
    group = batch.group.cpu()
    return sum(len(group[rows.cpu()].unique()) for rows in micro_batches(batch, budget))


def packed_tokens(shape: Shape, read: int) -> int:
    """Return the tokens that the model processes with `read` processed prompts."""
    return read * shape.prompt + shape.completions * (shape.completion - 1)


def replays(policy: Policy) -> list[str]:
    """Time forward and backward of every captured graph on the device."""
    found = []
    for one in policy.passes.captured() if policy.passes is not None else ():
        parts = [f"{one.rows.size.tokens} tokens"]
        for way, graph in (("forward", one.forward_graph), ("backward", one.backward_graph)):
            if graph is not None:
                seconds = statistics.median(event_seconds(graph.replay) for _ in range(5))
                parts.append(f"{way} {1e3 * seconds:.2f} ms")
        found.append(", ".join(parts))
    policy.optimizer.zero_grad()
    return found


def run(name: str, shape: Shape, setting: Setting) -> dict[str, Any]:
    device = setting.device
    budget = setting.budget or shape.budgets[setting.checkpointing]
    setting = replace(setting, megabytes=setting.megabytes or shape.megabytes)
    forget(device)
    policy = make_policy(shape.config, setting)
    objective = ALGORITHMS["grpo"](beta=0.0)
    batch = with_advantage(objective, make_batch(shape, setting.group, device))
    settings = StepSettings(
        mini_batches=1, epochs=1, micro_batch_tokens=budget, old_logp_from_sampler=True,
        learning_rate=lambda *_: 1e-6, seed=0,
    )  # fmt: skip

    def once() -> float:
        return seconds_of(
            lambda: optimize(
                Run(policy=policy, objective=objective, settings=settings), batch, step=0
            ),
            device,
        )

    warmup = [once() for _ in range(setting.warmup)]
    times = [once() for _ in range(setting.repeat)]
    seconds = statistics.median(times)
    if setting.profile:
        profile(once)
    counted = shape.completions * (shape.prompt + shape.completion)
    read = readings(batch, budget)
    seen = packed_tokens(shape, read)
    return {
        "shape": name,
        "checkpointing": setting.checkpointing,
        "offload": setting.offload,
        "rank": setting.rank,
        "state": setting.state,
        "budget": budget,
        "micro_batches": len(list(micro_batches(batch, budget))),
        "flash": policy.model.flash,
        "fused": policy.model.fused,
        "graphs": setting.graphs,
        "recorded": len(policy.passes.captured()) if policy.passes is not None else 0,
        "warmup_s": [round(taken, 2) for taken in warmup],
        "seconds": round(seconds, 4),
        "fastest": round(min(times), 4),
        "tokens": counted,
        "packed": seen,
        "tokens_per_s": round(counted / seconds),
        "mfu": round(flops(shape, counted) / seconds / PEAK, 3),
        "work": round(flops(shape, seen, shared=shape.completions / read) / seconds / PEAK, 3),
        **peaks(device),
        "replays": replays(policy),
    }


def profile(once: Any) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        once()
    table = found.key_averages()
    print(table.table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=90))
    print(table.table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=60))


def settings_of(arguments: argparse.Namespace) -> Iterator[tuple[bool, bool]]:
    """Yield what to try: with checkpointing or not, with graphs or not."""
    which = {"no": [False], "yes": [True], "off": [False], "auto": [True], "both": [False, True]}
    yield from product(which[arguments.checkpointing], which[arguments.graphs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*shapes(), "all"], default="all")
    parser.add_argument("--checkpointing", choices=["no", "yes", "both"], default="both")
    parser.add_argument("--graphs", choices=["off", "auto", "both"], default="auto")
    parser.add_argument("--state", choices=["float32", "compact"], default="float32")
    parser.add_argument("--rank", type=int, default=0, help="of a LoRA adapter")
    parser.add_argument("--offload", action="store_true", help="with --checkpointing yes")
    parser.add_argument("--budget", type=int, default=0, help="packed tokens; 0: the shape's own")
    parser.add_argument(
        "--megabytes", type=float, default=0.0, help="for logits; 0: the shape's own"
    )
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--layers", type=int, default=0, help="fewer layers, to try it out")
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--completion", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for name, shape in shapes().items():
        if arguments.shape not in (name, "all"):
            continue
        if arguments.layers:
            shape.config.num_hidden_layers = arguments.layers
        shape = replace(
            shape,
            prompt=arguments.prompt or shape.prompt,
            completion=arguments.completion or shape.completion,
        )
        for checkpointing, graphs in settings_of(arguments):
            setting = Setting(
                device=arguments.device, checkpointing=checkpointing, graphs=graphs,
                budget=arguments.budget, megabytes=arguments.megabytes, group=arguments.group,
                repeat=arguments.repeat, profile=arguments.profile, state=arguments.state,
                rank=arguments.rank, offload=arguments.offload,
            )  # fmt: skip
            result = run(name, shape, setting)
            print("  ".join(f"{key} {value}" for key, value in result.items()), flush=True)
            results.append(result)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
