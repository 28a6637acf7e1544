"""Rounding in bfloat16: how much each place adds to the engine-trainer log-prob difference.

    python benchmarks/rounding.py                      # the embedded model: a minute
    python benchmarks/rounding.py --model smollm2      # half an hour on two cores

Two implementations of one model add up products in different orders. In float32 the results differ
in the last bits. In bfloat16 a sum near the middle of two numbers is rounded up by one and down by
the other, 2^-9 apart, in every layer. This script computes a Llama-like model in float32 and rounds
by hand at the places where kernels with a float32 residual stream round. It does so twice, with
noise of the size of float32's last bits in place of another order, on sampled completions.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from described import described
from torch.nn.functional import rms_norm, silu

from covey.config.smoke import WORD_PROBLEMS
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Sampling
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model
from covey.rollout.episode import encode_prompts, generate
from covey.rollout.prompts import step_prompts
from covey.tasks.registry import make_task
from covey.tasks.task import Task

PLACES = {
    "products": "results of matrix products",
    "norms": "inputs of products in a layer: the norms' results",
    "turned": "queries and keys after the rotary embedding, values",
    "probabilities": "attention weights before they multiply values",
    "attended": "results of attention",
    "gated": "gate times up",
    "final": "the last norm's result, which the head reads",
}
NOISE = 3e-7
"""What another order of addition changes, relative to a number."""
OUTPUT = Path(__file__).parent / "results" / "rounding.json"


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounds to bfloat16 in some places, after a little noise everywhere."""

    places: Set[str]
    noise: torch.Generator | None

    def __call__(self, values: torch.Tensor, place: str) -> torch.Tensor:
        """Return values as a kernel would store them."""
        if self.noise is not None:
            values = values * (1 + NOISE * torch.randn(values.shape, generator=self.noise))
        return values.bfloat16().float() if place in self.places else values


def hidden_states(model: Any, tokens: torch.Tensor, rounded: Rounding) -> torch.Tensor:
    """Return the head's input [positions, width] of a Llama-like model."""
    count = len(tokens)
    hidden = model.embed_tokens(tokens)
    rope = [t[0, :, None] for t in model.rotary_emb(hidden, torch.arange(count)[None])]
    future = torch.full((count, count), -math.inf).triu(1)
    for layer in model.layers:
        normed = rounded(_norm(layer.input_layernorm, hidden), "norms")
        attended = _attention(layer.self_attn, normed, rope, future, rounded)
        hidden = hidden + rounded(layer.self_attn.o_proj(attended), "products")
        normed = rounded(_norm(layer.post_attention_layernorm, hidden), "norms")
        gate, up = (
            rounded(m(normed), "products") for m in (layer.mlp.gate_proj, layer.mlp.up_proj)
        )
        gated = rounded(silu(gate) * up, "gated")
        hidden = hidden + rounded(layer.mlp.down_proj(gated), "products")
    return rounded(_norm(model.norm, hidden), "final")


def _norm(module: Any, values: torch.Tensor) -> torch.Tensor:
    return rms_norm(values, values.shape[-1:], module.weight, module.variance_epsilon)


def _attention(
    module: Any,
    normed: torch.Tensor,
    rope: list[torch.Tensor],
    future: torch.Tensor,
    rounded: Rounding,
) -> torch.Tensor:
    size = module.head_dim
    projections = (module.q_proj, module.k_proj, module.v_proj)
    heads = [rounded(m(normed), "products").view(len(normed), -1, size) for m in projections]
    query, key, value = (
        rounded(h, "turned") for h in (_turned(heads[0], rope), _turned(heads[1], rope), heads[2])
    )
    key, value = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
    scores = torch.einsum("thd,shd->hts", query, key) * module.scaling + future
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)  # kernels add up unrounded weights
    mixed = torch.einsum("hts,shd->thd", rounded(weights, "probabilities") / total, value)
    return rounded(mixed.flatten(1), "attended")


def _turned(heads: torch.Tensor, rope: list[torch.Tensor]) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * rope[0] + torch.cat((-second, first), dim=-1) * rope[1]


Tokens = tuple[list[int], list[int]]
"""Tokens of a prompt and of its completion."""


def sampled(model: LanguageModel, task: Task, prompts: int, tokens: int) -> list[Tokens]:
    """Return prompts and sampled completions."""
    encoded = encode_prompts(model, step_prompts(task.train(), seed=0, step=0, count=prompts))
    sampling = Sampling(group_size=2, max_tokens=tokens)
    groups = generate(encoded, engine=NativeEngine(model), model=model, sampling=sampling, step=0)
    return [(list(r.prompt_tokens), list(r.tokens)) for group in groups for r in group.rollouts]


def logp_of(model: LanguageModel, completions: list[Tokens], rounded: Rounding) -> torch.Tensor:
    """Return the log-probability of every token of the completions."""
    parts = []
    for prompt, completion in completions:
        states = hidden_states(model.backbone, torch.tensor(prompt + completion), rounded)
        logits = model.model.get_output_embeddings()(states[len(prompt) - 1 : -1])
        parts.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(parts)


def cases() -> Iterator[tuple[str, Set[str]]]:
    """Yield which places round: all, none, all but one, and one alone."""
    yield "everywhere", set(PLACES)
    yield "nowhere", set()
    yield "everywhere but in products", set(PLACES) - {"products"}
    for place in PLACES:
        if place != "products":
            yield f"... nor in {place}", set(PLACES) - {"products", place}
    for place in PLACES:
        yield f"only in {place}", {place}


def measure(
    logp: Callable[[Rounding], torch.Tensor], show: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the mean difference of two passes, and of one from float32, for every case."""
    exact = logp(Rounding(set(), None))
    rows = []
    for name, places in cases():
        one, other = (logp(Rounding(places, torch.Generator().manual_seed(s))) for s in (1, 2))
        row = {
            "rounded": name,
            "between_two": float((one - other).abs().mean()),
            "from_float32": float((one - exact).abs().mean()),
        }
        rows.append(row)
        show(f"| {name} | {row['between_two']:.2g} | {row['from_float32']:.2g} |")
    return rows


def main() -> None:
    """Sample completions, compute their log-probs with each rounding, and write a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="embedded", help="a folder, a hub name, or smollm2")
    parser.add_argument(
        "--prompts", type=int, default=12, help="word problems, two completions each"
    )
    parser.add_argument("--tokens", type=int, default=96, help="longest completion")
    parser.add_argument("--out", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    model = load_language_model(arguments.model, dtype="float32", device="cpu")
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.copy_(parameter.bfloat16())
        embedded = arguments.model == "embedded"
        task = make_task("arithmetic", {}) if embedded else make_task("gsm8k", WORD_PROBLEMS)
        completions = sampled(model, task, arguments.prompts, arguments.tokens)
        count = sum(len(completion) for _, completion in completions)
        print(f"{count:,} tokens of {arguments.model}; mean difference in nats")
        print("| rounded | between two passes | from float32 |\n|---|---|---|", flush=True)
        rows = measure(
            lambda rounded: logp_of(model, completions, rounded),
            lambda line: print(line, flush=True),
        )
    about = described(0, "cpu", torch.get_num_threads())
    name = Path(arguments.model).name  # without the folders of this machine
    result = {**about, "model": name, "tokens": count, "rows": rows}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
