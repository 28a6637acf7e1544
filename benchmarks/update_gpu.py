"""How fast and how small an update is on a GPU: covey/train/update.py, whole, on made-up answers.

    python benchmarks/update_gpu.py --out update.json            # both shapes, all settings
    python benchmarks/update_gpu.py --shape smollm2 --profile    # and where the time goes
    python benchmarks/update_gpu.py --shape smollm2 --checkpointing no --graphs both
    python benchmarks/update_gpu.py --shape qwen2.5 --checkpointing yes --state compact

With graphs, `replays` says of each recorded pass how long the device takes for it, forward and
backward, with nothing else to do; what an update takes beyond their sum is Python, or the
optimizer. The peak is of what torch has handed out, while graphs are recorded above all;
`reserved` is what a device needs to have.

Weights are random and nothing is downloaded. Tokens are counted as answers x (prompt + completion),
as if every prompt were read for every answer; `packed` says how many the model really sees. MFU
counts 6 flops a weight and token, and attention; `mfu` over the counted tokens, `work` over those
that are really seen, both without anything that checkpointing or the head computes again.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from covey.embedded import CHECKPOINT
from covey.objective import ALGORITHMS, with_advantage
from covey.policy.compact import CompactAdamW
from covey.policy.layout import micro_batches
from covey.policy.model import wrap
from covey.policy.optimizer import MasterAdamW
from covey.policy.policy import Policy
from covey.train.update import UpdateSettings, update
from covey.types import Batch

PEAK = 989e12
"""Dense bfloat16 flops a second of an H100 or H200, by its data sheet."""


@dataclass(frozen=True)
class Shape:
    config: Any
    answers: int
    prompt: int
    completion: int
    budgets: tuple[int, int]
    """Packed tokens of a micro-batch, without checkpointing and with it."""


def shapes() -> dict[str, Shape]:
    return {
        "smollm2": Shape(
            transformers.LlamaConfig(
                vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9,
                num_key_value_heads=3, intermediate_size=1536, max_position_embeddings=8192,
                tie_word_embeddings=True, rms_norm_eps=1e-5,
            ),
            answers=128, prompt=128, completion=256, budgets=(8_192, 12_288),
        ),
        "qwen2.5": Shape(
            transformers.Qwen2Config(
                vocab_size=151936, hidden_size=1536, num_hidden_layers=28, num_attention_heads=12,
                num_key_value_heads=2, intermediate_size=8960, max_position_embeddings=32768,
                tie_word_embeddings=True,
            ),
            answers=32, prompt=256, completion=768, budgets=(4_096, 8_192),
        ),
    }  # fmt: skip


def make_policy(
    config: Any,
    *,
    checkpointing: bool,
    megabytes: float,
    device: str,
    graphs: bool = True,
    state: str = "float32",
) -> Policy:
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    whole = wrap(model, tokenizer, "made up")
    settings: dict[str, Any] = {
        "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0,
    }  # fmt: skip
    kind = partial(CompactAdamW, seed=0) if state == "compact" else MasterAdamW
    optimizer = kind(model.named_parameters(), **settings)
    return Policy(
        model=whole, optimizer=optimizer, temperature=1.0, logits_megabytes=megabytes, graphs=graphs
    )


def make_batch(shape: Shape, group: int, device: str) -> Batch:
    generator = torch.Generator().manual_seed(0)
    groups, rows = shape.answers // group, shape.answers
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


def flops(shape: Shape, tokens: int, *, shared: int = 1) -> float:
    """Return what one update needs by arithmetic: three times the forward pass."""
    config = shape.config
    size = config.hidden_size // config.num_attention_heads
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    layer = config.hidden_size * (size * (2 * heads + 2 * keys) + 3 * config.intermediate_size)
    trained = shape.answers * shape.completion
    length = shape.prompt + shape.completion
    pairs = length**2 / 2 - (1 - 1 / shared) * shape.prompt**2 / 2
    attention = 4 * shape.answers * pairs * heads * size * config.num_hidden_layers
    head = 2 * config.vocab_size * config.hidden_size * (tokens if shared == 1 else trained)
    return 3 * (2 * layer * config.num_hidden_layers * tokens + head + attention)


def packed_tokens(shape: Shape, group: int) -> int:
    return shape.answers // group * shape.prompt + shape.answers * (shape.completion - 1)


def replays(policy: Policy) -> list[str]:
    """Time both ways of every recorded pass on the device; the gradients are worth nothing."""
    found = []
    for one in policy.passes.recorded() if policy.passes is not None else ():
        parts = [f"{one.rows.size.tokens} tokens"]
        for way, graph in (("forward", one.forward_graph), ("backward", one.backward_graph)):
            times = [milliseconds(graph.replay) for _ in range(5)] if graph is not None else []
            parts += [f"{way} {statistics.median(times):.2f} ms"] if times else []
        found.append(", ".join(parts))
    policy.optimizer.zero_grad()
    return found


def milliseconds(call: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def run(
    name: str, shape: Shape, arguments: argparse.Namespace, checkpointing: bool, graphs: bool
) -> dict:
    device = arguments.device
    budget = arguments.budget or shape.budgets[checkpointing]
    gc.collect()  # a policy and its recorded passes know each other
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    policy = make_policy(
        shape.config, checkpointing=checkpointing, megabytes=arguments.megabytes, device=device,
        graphs=graphs, state=arguments.state,
    )  # fmt: skip
    objective = ALGORITHMS["grpo"](beta=0.0)
    batch = with_advantage(objective, make_batch(shape, arguments.group, device))
    settings = UpdateSettings(
        mini_batches=1, epochs=1, token_budget=budget, old_logp_from_sampler=True,
        learning_rate=lambda _: 1e-6, seed=0,
    )  # fmt: skip

    def once() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        update(batch, policy=policy, objective=objective, settings=settings, step=0)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    first, second, third = once(), once(), once()  # graphs of rare sizes are recorded late
    times = [once() for _ in range(arguments.repeat)]
    seconds = statistics.median(times)
    if arguments.profile:
        profile(once)
    counted = shape.answers * (shape.prompt + shape.completion)
    seen = packed_tokens(shape, arguments.group)
    return {
        "shape": name,
        "checkpointing": checkpointing,
        "state": arguments.state,
        "budget": budget,
        "micro_batches": len(list(micro_batches(batch, budget))),
        "flash": policy.model.flash,
        "fused": policy.model.fused,
        "graphs": graphs,
        "recorded": len(policy.passes.recorded()) if policy.passes is not None else 0,
        "first_s": round(first, 2),
        "second_s": round(second, 2),
        "third_s": round(third, 2),
        "seconds": round(seconds, 4),
        "fastest": round(min(times), 4),
        "tokens": counted,
        "packed": seen,
        "tokens_per_s": round(counted / seconds),
        "mfu": round(flops(shape, counted) / seconds / PEAK, 3),
        "work": round(flops(shape, seen, shared=arguments.group) / seconds / PEAK, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*shapes(), "all"], default="all")
    parser.add_argument("--checkpointing", choices=["no", "yes", "both"], default="both")
    parser.add_argument("--graphs", choices=["off", "auto", "both"], default="auto")
    parser.add_argument("--state", choices=["float32", "compact"], default="float32")
    parser.add_argument("--budget", type=int, default=0, help="packed tokens; 0: the shape's own")
    parser.add_argument("--megabytes", type=float, default=512.0, help="for logits")
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
        shape = Shape(
            shape.config,
            shape.answers,
            arguments.prompt or shape.prompt,
            arguments.completion or shape.completion,
            shape.budgets,
        )
        for checkpointing in {"no": [False], "yes": [True], "both": [False, True]}[
            arguments.checkpointing
        ]:
            for graphs in {"off": [False], "auto": [True], "both": [False, True]}[arguments.graphs]:
                result = run(name, shape, arguments, checkpointing, graphs)
                print("  ".join(f"{key} {value}" for key, value in result.items()), flush=True)
                results.append(result)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
