"""The same completions through TRL's own trainers and through covey: the same loss and gradient.

TRL's side is a real trainer, built from a real configuration, for every row of the table below. It
pads, scores, takes old and reference log-probabilities, advantages and importance ratios, and its
`_compute_loss` makes the loss of them. Only sampling is left out: the completions are already there.
Between that and the loss the weights are moved, so ratios are far from 1 and clips act on both
sides. Where TRL means something else on purpose, the tests at the end put a number to it.

Written beside TRL 1.16. What it calls differently, or does not have:

- The default of `loss_type` is "dapo", and of `use_bias_correction_kl` true: `kl = "ratio_k3"`.
- `epsilon` is our `clip_low`; without `epsilon_high` it is our `clip_high` too.
- Advantages are divided by std + 1e-4, ddof 1; `eps` is 1e-4 here. There is no guard for groups of
  equal rewards.
- `loss_type` does not touch advantages: dr_grpo needs `scale_rewards="none"`, lite_ppo "batch".
- cispo's `epsilon_high` is the cap itself, our `max_weight`; for other losses it is added to 1.
- sapo: `sapo_temperature_pos` is our `tau_pos`; vespo: `vespo_k_*` is `power_*`, `vespo_lambda_*`
  is `rate_*`; `delta` is `dual`.
- GSPO is `importance_sampling_level="sequence"` with `loss_type="grpo"`. There is no GSPO-token.
- Corrections for the sampler exist for vLLM only; `vllm_importance_sampling_clip_max` is 3 by
  default where `correction_high` is 2.
- `top_entropy_quantile` is of the entropies of the policy now, in one micro-batch; `top_entropy` is
  of those of the policy that sampled, in the rollout batch. Here we are given those of now.
- Token means are over the tokens of a generation, divided by its steps; ours over those of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

import covey.functional
from covey.accel.head import Head
from covey.embedded import CHECKPOINT
from covey.errors import ConfigError
from covey.models.language_model import LanguageModel
from covey.models.logp import LogProbs, batch_logp
from covey.objective.advantage import sum_of_standardized
from covey.objective.masked import row_mean
from covey.types import Batch

pytest.importorskip("trl", minversion="1.16", reason="there is no TRL, or an older one")
# A rollout_func is how the completions get in; TRL warns that it is experimental.
pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")

PROMPTS, SAMPLES = 3, 6
ROWS = PROMPTS * SAMPLES
GROUP = torch.arange(ROWS) // SAMPLES
LONGEST = 14
BUDGET = 20
"""max_completion_length; longer than any completion, so that dr_grpo's constant is not the width."""
TEMPERATURE = 2.0
END = 1
CUT_OFF = (4, 9)
"""Rows that do not end with an end-of-sequence token."""
REWARDS = [1, 0, 0.25, 0.5, 0, 1, 0.75, 0, 0, 0.25, 1, 0, 0.5, 0.5, 0.25, 1, 0.75, 0]
"""All of them exact in float32, in which TRL keeps rewards."""
EPS = {"eps": 1e-4}


class Case(NamedTuple):
    """A configuration of TRL, the algorithm and options that are the same, and what must act."""

    trl: dict[str, Any]
    name: str
    options: dict[str, Any]
    acts: tuple[str, ...] = ()
    """Metrics of ours that must lie between 0 and 1, so that the case shows what it is about."""
    sampler: bool = False
    """Whether TRL corrects for a sampler, which it does for vLLM."""
    rewards: list[float | None] = REWARDS


CLIPS = ("policy/clipfrac_low", "policy/clipfrac_high")
WEIGHS = ("policy/correction_ess",)
DROPS = ("policy/correction_dropped",)


def corrected(
    mode: str, clip_low: float | None, clip_high: float, acts: tuple[str, ...] = ()
) -> Case:
    trl = {
        "loss_type": "grpo",
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": clip_low,
        "vllm_importance_sampling_clip_max": clip_high,
    }
    bounds = {"correction_low": clip_low or 0.0, "correction_high": clip_high}
    return Case(trl, "grpo", {"beta": 0.0, "correction": mode, **bounds, **EPS}, acts, sampler=True)


SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
NARROW = {"epsilon": 0.03, "epsilon_high": 0.04}
OURS_NARROW = {"clip_low": 0.03, "clip_high": 0.04, **EPS}
K3 = {"beta": 0.04, "use_bias_correction_kl": False}

CASES = {
    "grpo": Case({"loss_type": "grpo"}, "grpo", {"beta": 0.0, **EPS}, CLIPS),
    "grpo, unequal clips": Case(
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3},
        "grpo", {"beta": 0.0, "clip_low": 0.1, "clip_high": 0.3, **EPS}, CLIPS,
    ),
    "grpo, k3": Case({"loss_type": "grpo", **K3}, "grpo", {"beta": 0.04, "kl": "k3", **EPS}, CLIPS),
    "grpo, ratio_k3": Case(
        {"loss_type": "grpo", "beta": 0.04}, "grpo", {"beta": 0.04, "kl": "ratio_k3", **EPS}, CLIPS
    ),
    "grpo, dual": Case(
        {"loss_type": "grpo", "delta": 1.3}, "grpo", {"beta": 0.0, "dual": 1.3, **EPS},
        (*CLIPS, "policy/clipfrac_dual"),
    ),
    # A completion that is left out keeps its place in the mean over completions, and in the advantages.
    "grpo, truncated left out": Case(
        {"loss_type": "grpo", "mask_truncated_completions": True},
        "grpo", {"beta": 0.0, **EPS}, CLIPS,
    ),
    "grpo, top entropy": Case(
        {"loss_type": "grpo", **K3, "top_entropy_quantile": 0.4},
        "grpo", {"beta": 0.04, "top_entropy": 0.4, **EPS}, CLIPS,
    ),
    "grpo, off-policy limit": Case(
        {"loss_type": "grpo", **K3, "off_policy_mask_threshold": 0.1},
        "grpo", {"beta": 0.04, "off_policy_limit": 0.1, **EPS}, (*CLIPS, "policy/off_policy_dropped"),
    ),
    "dr_grpo": Case(
        {"loss_type": "dr_grpo", "scale_rewards": "none"}, "dr_grpo", {"length": BUDGET}, CLIPS
    ),
    # The trap: without scale_rewards it divides by the deviation, which Dr.GRPO is about not doing.
    "dr_grpo by loss_type alone": Case(
        {"loss_type": "dr_grpo"}, "composed",
        {"weights": "sequence_mean_token_sum_norm", "length": BUDGET, **EPS}, CLIPS,
    ),
    "dapo": Case({"loss_type": "dapo", "epsilon_high": 0.28}, "dapo", EPS, CLIPS),
    # bnpo is the token mean of a micro-batch: that of the step if there is one micro-batch.
    "bnpo": Case({"loss_type": "bnpo", "epsilon_high": 0.28}, "dapo", EPS, CLIPS),
    "dapo, entropy bonus": Case(
        {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.01},
        "dapo", {"entropy_bonus": 0.01, **EPS}, CLIPS,
    ),
    "lite_ppo": Case({"loss_type": "dapo", "scale_rewards": "batch"}, "lite_ppo", EPS, CLIPS),
    "gspo": Case({**SEQUENCE, **NARROW}, "gspo", OURS_NARROW, CLIPS),
    "gspo, k3": Case({**SEQUENCE, **NARROW, **K3}, "gspo", {**OURS_NARROW, "beta": 0.04}, CLIPS),
    # TRL's is that of gspo: the same while all tokens of a completion have one advantage.
    "gspo_token": Case({**SEQUENCE, **NARROW}, "gspo_token", OURS_NARROW, CLIPS),
    "luspo": Case({**SEQUENCE, **NARROW, "loss_type": "luspo"}, "luspo", OURS_NARROW, CLIPS),
    # Of which TRL says that it is not GSPO: completions weigh as much as they have tokens.
    "dapo by completion": Case(
        {**SEQUENCE, **NARROW, "loss_type": "dapo"},
        "composed", {"ratio": "sequence", "weights": "token_mean", **OURS_NARROW}, CLIPS,
    ),
    "cispo": Case(
        {"loss_type": "cispo", "epsilon_high": 1.3}, "cispo", {"max_weight": 1.3, **EPS},
        ("policy/clipfrac_high",),
    ),
    "sapo": Case(
        {"loss_type": "sapo", "sapo_temperature_pos": 1.1, "sapo_temperature_neg": 1.7},
        "sapo", {"tau_pos": 1.1, "tau_neg": 1.7, **EPS},
    ),
    "vespo": Case({"loss_type": "vespo"}, "vespo", EPS),
    "token_truncate": corrected("token_truncate", 0.8, 1.2, WEIGHS),
    "token_mask": corrected("token_mask", 0.6, 1.6, DROPS),
    "sequence_truncate": corrected("sequence_truncate", None, 1.3, WEIGHS),
    "sequence_mask": corrected("sequence_mask", 0.5, 2.0, DROPS),
}  # fmt: skip


METRICS = {
    "clip_ratio/low_mean": "policy/clipfrac_low",
    "clip_ratio/high_mean": "policy/clipfrac_high",
    "clip_ratio/region_mean": "policy/clipfrac_avg",
    "kl": "objective/kl_avg",
    "entropy": "policy/entropy_avg",
}
"""What both count alike: over tokens, or over completions where a ratio is of a completion."""


@dataclass(frozen=True)
class World:
    """A small real model, its completions to three prompts, and its weights then and now."""

    model: Any
    tokenizer: Any
    prompts: list[list[int]]
    completions: list[list[int]]
    trained: list[list[int]]
    sampler_logp: list[list[float]]
    then: dict[str, torch.Tensor]
    now: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def world() -> World:
    generator = torch.Generator().manual_seed(0)
    # Float64 weights leave only the rounding of TRL's head, which is float32 whatever they are.
    model = transformers.AutoModelForCausalLM.from_pretrained(str(CHECKPOINT), dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(CHECKPOINT), padding_side="left")

    def moved(size: float) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            for weight in model.parameters():
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight += size * weight.std() * noise
        return {name: value.clone() for name, value in model.state_dict().items()}

    def completion(prompt: list[int], length: int, end: bool) -> tuple[list[int], list[float]]:
        ids, logps = list(prompt), []
        for place in range(length):
            logits = model(torch.tensor([ids])).logits[0, -1] / TEMPERATURE
            drawn = int(torch.multinomial(logits.softmax(0), 1, generator=generator))
            ids.append(END if end and place == length - 1 else max(drawn, END + 1))
            logps.append(float(logits.log_softmax(0)[ids[-1]]))
        return ids[len(prompt) :], logps

    then = moved(0.1)  # so that the reference, which TRL loads from the checkpoint, is another
    prompt_ids = [tokenizer.encode(text) for text in ("1+2?", "47+8-6?", "3-1?")]
    prompts = [prompt_ids[row // SAMPLES] for row in range(ROWS)]
    lengths = torch.randint(2, LONGEST + 1, (ROWS,), generator=generator).tolist()
    lengths[:SAMPLES] = [min(length, 5) for length in lengths[:SAMPLES]]
    lengths[7] = LONGEST
    with torch.no_grad():
        drawn = [completion(prompts[row], lengths[row], row not in CUT_OFF) for row in range(ROWS)]
    noise = lambda: 0.3 * float(torch.randn((), generator=generator))  # noqa: E731
    trained = [[1] * length for length in lengths]
    trained[7][4:7] = [0, 0, 0]  # as if a tool had said it
    return World(
        model=model.train(),
        tokenizer=tokenizer,
        prompts=prompts,
        completions=[tokens for tokens, _ in drawn],
        trained=trained,
        sampler_logp=[[logp + noise() for logp in logps] for _, logps in drawn],
        then=then,
        now=moved(0.15),
    )


def arguments(folder: Path, **settings: Any) -> dict[str, Any]:
    """Return what GRPOConfig and RLOOConfig both need here."""
    plain = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "per_device_train_batch_size": ROWS,
        "num_generations": SAMPLES,
        "num_iterations": 2,  # otherwise it takes the old policy to be the one now
        "max_completion_length": BUDGET,
        "temperature": TEMPERATURE,
    }
    return {**plain, **settings}


def grpo_trainer(
    world: World, folder: Path, settings: dict[str, Any], *rewards: list[float | None]
) -> Any:
    """Build a GRPOTrainer that is given its completions; every list of rewards is a function's."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": world.prompts,
            "completion_ids": world.completions,
            "logprobs": world.sampler_logp,
            "env_mask": world.trained,
        }

    trainer = GRPOTrainer(
        model=world.model,
        reward_funcs=[lambda values=values, **_: list(values) for values in rewards],
        args=GRPOConfig(**arguments(folder, **settings)),
        train_dataset=Dataset.from_dict({"prompt": ["?"]}),
        processing_class=world.tokenizer,
        rollout_func=rollouts,
    )
    # As `train` does at the start of every optimizer step.
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def collect(trainer: Any) -> dict[str, Any]:
    """Let the trainer pad, score and compare the completions: what `_compute_loss` takes."""
    return trainer._generate_and_score_completions([{"prompt": "?"} for _ in range(ROWS)])


def of_case(world: World, folder: Path, case: Case) -> Any:
    trainer = grpo_trainer(world, folder, case.trl, case.rewards)
    if case.sampler:
        # The configuration's use_vllm would start an engine; this is all that is left of it.
        trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    return trainer


def trained_tokens(inputs: dict[str, Any]) -> torch.Tensor:
    return (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()


def through_covey(
    case: Case, inputs: dict[str, Any], logp: torch.Tensor, entropy: torch.Tensor, **other: Any
) -> covey.functional.LossOutput:
    """Return our loss of the tensors that TRL made."""
    rewards = [math.nan if reward is None else reward for reward in case.rewards]
    tensors = {
        "logp": logp,
        "entropy": entropy,
        "old_logp": inputs["old_per_token_logps"],
        "ref_logp": inputs.get("ref_per_token_logps"),
        "sampler_logp": inputs["sampling_per_token_logps"],
        "mask": trained_tokens(inputs),
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "group": GROUP,
    }
    return covey.functional.loss(case.name, **{**tensors, **case.options, **other})


def own_logp(world: World, mask: torch.Tensor) -> LogProbs:
    """Return log-probabilities and entropies of the same model, as covey takes them."""

    def padded(rows: list[list[int]]) -> torch.Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    batch = Batch(
        prompt_tokens=padded(world.prompts),
        prompt_lengths=torch.tensor([len(row) for row in world.prompts]),
        tokens=padded(world.completions),
        lengths=torch.tensor([len(row) for row in world.completions]),
        mask=mask,
        sampler_logp=torch.zeros(mask.shape),
        rewards=torch.zeros(ROWS, dtype=torch.float64),
        success=torch.zeros(ROWS, dtype=torch.bool),
        group=GROUP,
        truncated=torch.zeros(ROWS, dtype=torch.bool),
    )
    model = LanguageModel(
        model=world.model,
        tokenizer=world.tokenizer,
        head=Head(linear=world.model.get_output_embeddings()),
        context=512,
        stop_ids=(END,),
    )
    return batch_logp(model, batch, temperature=TEMPERATURE)


def logged(trainer: Any) -> dict[str, float]:
    return {key: values[-1] for key, values in trainer._metrics["train"].items()}


def weight_gradients(world: World, loss: torch.Tensor) -> torch.Tensor:
    """Return the gradient in all weights of the model, one after the other."""
    world.model.zero_grad()
    loss.backward()
    return torch.cat([weight.grad.flatten() for weight in world.model.parameters()])


def assert_close(
    ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor], size: float
) -> None:
    """Compare losses, means of numbers of order 1, and gradients relative to their largest part."""
    (loss, gradient), (expected_loss, expected) = ours, theirs
    assert loss.item() == pytest.approx(expected_loss.item(), rel=size, abs=size)
    assert expected.abs().max() > 0
    assert (gradient - expected).abs().max() <= size * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_a_model_gets_the_loss_and_the_gradient_of_trl(
    name: str, world: World, tmp_path: Path
) -> None:
    case = CASES[name]
    trainer = of_case(world, tmp_path, case)
    world.model.load_state_dict(world.then)
    inputs = collect(trainer)
    world.model.load_state_dict(world.now)
    loss = trainer._compute_loss(trainer.model, inputs)
    expected = weight_gradients(world, loss)
    out = through_covey(case, inputs, *own_logp(world, trained_tokens(inputs)))
    got = weight_gradients(world, out.loss)
    assert_close((out.loss, got), (loss, expected), 1e-5)
    assert [metric for metric in case.acts if not 0 < out.metrics[metric] < 1] == []
    theirs = {METRICS[key]: value for key, value in logged(trainer).items() if key in METRICS}
    if "top_entropy" in case.options:  # see the test of what is counted as clipped, below
        theirs = {key: value for key, value in theirs.items() if "clipfrac" not in key}
    assert theirs == pytest.approx({key: out.metrics[key] for key in theirs}, rel=1e-5, abs=1e-7)
    assert "policy/entropy_avg" in theirs


# The rest is in float64 throughout: log-probabilities and entropies are handed to the trainer, and
# all that it does with them is its own.


class Given(NamedTuple):
    """Log-probabilities and entropies [B, T], float64."""

    old: torch.Tensor
    ref: torch.Tensor
    now: torch.Tensor
    entropy: torch.Tensor


class Step(NamedTuple):
    """What TRL makes of them."""

    inputs: dict[str, Any]
    loss: torch.Tensor
    gradient: torch.Tensor
    """In the log-probabilities, and in the entropies: [2, B, T]."""


@contextmanager
def doubles() -> Iterator[None]:
    """Make float64 the type of what TRL makes out of numbers, such as rewards and temperatures."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def given() -> Given:
    generator = torch.Generator().manual_seed(1)

    def noise() -> torch.Tensor:
        return torch.randn(ROWS, LONGEST, generator=generator, dtype=torch.float64)

    old = -noise().abs()
    # TRL rounds entropies to float32 before it looks for their quantile.
    entropy = noise().abs().float().double()
    return Given(old, old + 0.3 * noise(), old + 0.4 * noise(), entropy)


@pytest.fixture(scope="module")
def said(world: World, given: Given) -> World:
    """The same completions, sampled by something near the given old policy."""
    generator = torch.Generator().manual_seed(2)
    near = given.old + 0.3 * torch.randn(ROWS, LONGEST, generator=generator, dtype=torch.float64)
    pairs = zip(near.tolist(), world.completions, strict=True)
    return replace(world, sampler_logp=[row[: len(completion)] for row, completion in pairs])


def hand_over(trainer: Any, given: Given, logp: torch.Tensor, entropy: torch.Tensor) -> None:
    def look_up(model: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        return (given.ref if model is trainer.ref_model else logp), entropy, None

    trainer._get_per_token_logps_and_entropies = look_up


def leaves_of(given: Given, rows: slice = slice(None)) -> list[torch.Tensor]:
    return [tensor[rows].clone().requires_grad_() for tensor in (given.now, given.entropy)]


def step_of(trainer: Any, given: Given, rows: slice = slice(None)) -> Step:
    """Let the trainer collect all rows, and take the loss of some of them."""
    with doubles():
        hand_over(trainer, given, given.old, given.entropy)
        inputs = collect(trainer)
        part = {key: value[rows] if value.ndim else value for key, value in inputs.items()}
        leaves = leaves_of(given, rows)
        hand_over(trainer, given, *leaves)
        loss = trainer._compute_loss(trainer.model, part)
    return Step(part, loss.detach(), token_gradients(loss, leaves))


def token_gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    parts = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return torch.stack(parts)


@pytest.mark.parametrize("name", CASES)
def test_every_token_has_the_gradient_of_trl(
    name: str, said: World, given: Given, tmp_path: Path
) -> None:
    case = CASES[name]
    theirs = step_of(of_case(said, tmp_path, case), given)
    leaves = leaves_of(given)
    out = through_covey(case, theirs.inputs, *leaves)
    ours = out.loss, token_gradients(out.loss, leaves)
    assert_close(ours, (theirs.loss, theirs.gradient), 1e-12)
    assert [metric for metric in case.acts if not 0 < out.metrics[metric] < 1] == []


def rloo_trainer(world: World, folder: Path, beta: float) -> Any:
    """Build an RLOOTrainer that is given its completions."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    trainer = RLOOTrainer(
        model=world.model,
        reward_funcs=[lambda **_: list(REWARDS)],
        args=RLOOConfig(**arguments(folder, beta=beta)),
        train_dataset=Dataset.from_dict({"prompt": ["?"]}),
        processing_class=world.tokenizer,
    )
    # It has no rollout_func, and no mask within a completion.
    trainer._generate = lambda prompts: (world.prompts, world.completions, [""] * ROWS)
    return trainer


def rloo(
    beta: float, mask: torch.Tensor, logp: torch.Tensor, old: torch.Tensor, ref: torch.Tensor
) -> covey.functional.LossOutput:
    out = covey.functional.loss(
        "rloo", logp=logp, old_logp=old, ref_logp=ref, mask=mask,
        rewards=torch.tensor(REWARDS), group=GROUP, beta=beta,
    )  # fmt: skip
    assert [metric for metric in CLIPS if not 0 < out.metrics[metric] < 1] == []
    return out


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_a_model_gets_the_loss_and_the_gradient_of_trl_by_rloo(
    beta: float, world: World, tmp_path: Path
) -> None:
    trainer = rloo_trainer(world, tmp_path, beta)
    world.model.load_state_dict(world.then)
    inputs = collect(trainer)
    mask = inputs["completion_mask"].bool()
    with torch.no_grad():
        # What TRL has of the old policy and of the reference is summed up by now.
        old, ref = own_logp(world, mask).logp, torch.zeros(mask.shape)
        if beta:
            ref = own_logp(replace(world, model=trainer.ref_model), mask).logp
    world.model.load_state_dict(world.now)
    loss = trainer._compute_loss(trainer.model, inputs)
    expected = weight_gradients(world, loss)
    out = rloo(beta, mask, own_logp(world, mask).logp, old, ref)
    assert_close((out.loss, weight_gradients(world, out.loss)), (loss, expected), 1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_every_token_has_the_gradient_of_trl_by_rloo(
    beta: float, world: World, given: Given, tmp_path: Path
) -> None:
    trainer = rloo_trainer(world, tmp_path, beta)
    theirs = step_of(trainer, given)
    mask, leaves = theirs.inputs["completion_mask"].bool(), leaves_of(given)
    out = rloo(beta, mask, leaves[0], given.old, given.ref)
    ours = out.loss, token_gradients(out.loss, leaves)
    assert_close(ours, (theirs.loss, theirs.gradient), 1e-12)
    for key in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
        assert out.metrics[METRICS[key]] == pytest.approx(logged(trainer)[key]), key


def test_parts_of_the_reward_standardized_one_by_one(
    said: World, given: Given, tmp_path: Path
) -> None:
    parts = [REWARDS, [0.125 * (row % 5) for row in range(ROWS)]]
    settings = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]}
    theirs = step_of(grpo_trainer(said, tmp_path, settings, *parts), given).inputs["advantages"]
    ours = sum_of_standardized(torch.tensor(parts), GROUP, weights=[1.0, 0.5], eps=1e-4)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


# Where TRL is different, and by how much.


def test_equal_rewards_teach_trl_something(world: World, tmp_path: Path) -> None:
    world.model.load_state_dict(world.then)
    equal: list[float | None] = [0.3] * ROWS
    theirs = collect(grpo_trainer(world, tmp_path, {}, equal))["advantages"]
    # The float32 mean of six 0.3 is not 0.3, and the difference is divided by 1e-4.
    assert 1e-5 < theirs.abs().max() < 1e-2
    ours = covey.functional.advantages(
        "dapo", mask=torch.ones(ROWS, 2), rewards=torch.tensor(equal), group=GROUP, **EPS
    )
    assert ours.abs().max() == 0


def test_trl_divides_by_the_mean_tokens_of_a_step(
    said: World, given: Given, tmp_path: Path
) -> None:
    """Tokens of a generation over its steps: as many to every step, however long its completions are.

    Ours are the step's own. If a generation is one optimizer step, the two are the same.
    """
    case = CASES["dapo"]
    groups = [slice(at, at + SAMPLES) for at in range(0, ROWS, SAMPLES)]
    rounds = {"per_device_train_batch_size": SAMPLES, "steps_per_generation": PROMPTS}
    three = of_case(said, tmp_path, case._replace(trl={**case.trl, **rounds}))
    whole = step_of(of_case(said, tmp_path, case), given)
    factors = []
    for rows in groups:
        theirs = step_of(three, given, rows)
        rewards = torch.tensor(REWARDS)[rows]
        now = given.now[rows], given.entropy[rows]
        ours = through_covey(case, theirs.inputs, *now, rewards=rewards, group=GROUP[rows])
        factors.append(float(theirs.loss / ours.loss))
    tokens = trained_tokens(whole.inputs).sum(dim=1).view(PROMPTS, SAMPLES).sum(dim=1).double()
    assert factors == pytest.approx((tokens / tokens.mean()).tolist())
    assert max(factors) > 1.1
    # Accumulated into one optimizer step they do add up to the whole.
    accumulated = {**case.trl, **rounds, "gradient_accumulation_steps": PROMPTS}
    parts = of_case(said, tmp_path, case._replace(trl=accumulated))
    total = sum(step_of(parts, given, rows).loss for rows in groups)
    assert float(total) == pytest.approx(float(whole.loss))


def test_trl_weighs_the_kl_by_the_ratio_of_the_answer(
    said: World, given: Given, tmp_path: Path
) -> None:
    """Its importance_sampling_level is of the KL too; our `ratio_k3` is of the token, always."""
    trl = {**SEQUENCE, **NARROW}
    loss = {
        beta: step_of(grpo_trainer(said, tmp_path, {**trl, "beta": beta}, REWARDS), given).loss
        for beta in (0.0, 0.04)
    }
    case = Case(trl, "gspo", {**OURS_NARROW, "beta": 0.04, "kl": "ratio_k3"})
    inputs = step_of(grpo_trainer(said, tmp_path, {**trl, "beta": 0.04}, REWARDS), given).inputs
    ours = through_covey(case, inputs, given.now, given.entropy).loss - loss[0.0]
    mask = trained_tokens(inputs)
    d, x = given.now - given.ref, given.now - given.old
    k3 = torch.expm1(-d) + d
    by_answer = row_mean(row_mean(x, mask).exp() * k3, mask).mean()
    by_token = row_mean(x.exp() * k3, mask).mean()
    assert float(loss[0.04] - loss[0.0]) == pytest.approx(float(0.04 * by_answer))
    assert float(ours) == pytest.approx(float(0.04 * by_token))
    assert abs(by_answer - by_token) > 1e-3


def test_trl_leaves_no_token_of_an_answer_out(said: World, given: Given, tmp_path: Path) -> None:
    """A token left out for its entropy still moves the ratio of its completion, and so has a gradient.

    So we refuse that for `gspo`; in `gspo_token` what is left out has none.
    """
    trl = {**SEQUENCE, **NARROW, "top_entropy_quantile": 0.4}
    theirs = step_of(grpo_trainer(said, tmp_path, trl, REWARDS), given)
    case = Case(trl, "gspo", {**OURS_NARROW, "top_entropy": 0.4})
    with pytest.raises(ConfigError, match="one term per completion"):
        through_covey(case, theirs.inputs, given.now, given.entropy)
    leaves = leaves_of(given)
    out = through_covey(case._replace(name="gspo_token"), theirs.inputs, *leaves)
    left_out = trained_tokens(theirs.inputs) & (out.advantage == 0)
    assert 0.5 < left_out.sum() / trained_tokens(theirs.inputs).sum() < 0.7
    assert theirs.gradient[0][left_out].abs().max() > 1e-3
    assert token_gradients(out.loss, leaves)[0][left_out].abs().max() == 0
    assert float(out.loss.detach()) == pytest.approx(float(theirs.loss))


def test_an_unscored_completion_counts_in_trls_mean(
    said: World, given: Given, tmp_path: Path
) -> None:
    """It has no reward (TRL's None): no advantage, but TRL's mean over completions counts it."""
    rewards = [None if row in (2, 13) else reward for row, reward in enumerate(REWARDS)]
    case = Case({"loss_type": "grpo"}, "grpo", {"beta": 0.0, **EPS}, rewards=rewards)
    theirs = step_of(of_case(said, tmp_path, case), given)
    leaves = leaves_of(given)
    out = through_covey(case, theirs.inputs, *leaves)
    share = (ROWS - 2) / ROWS
    ours = out.loss * share, token_gradients(out.loss, leaves) * share
    assert_close(ours, (theirs.loss, theirs.gradient), 1e-12)


def test_what_is_counted_as_clipped(said: World, given: Given, tmp_path: Path) -> None:
    # TRL counts tokens that were left out for their entropy; our share is of the others.
    trainer = of_case(said, tmp_path, CASES["grpo, top entropy"])
    inputs = step_of(trainer, given).inputs
    out = through_covey(CASES["grpo, top entropy"], inputs, given.now, given.entropy)
    whole = through_covey(
        CASES["grpo, top entropy"], inputs, given.now, given.entropy, top_entropy=1.0
    )
    ratio, mask = (given.now - given.old).exp(), trained_tokens(inputs)
    kept = mask & (given.entropy >= torch.quantile(given.entropy[mask], 0.6))
    clipped = ((ratio > 1.2) & (whole.advantage > 0)) | ((ratio < 0.8) & (whole.advantage < 0))
    share = float(clipped[kept].double().mean())
    assert out.metrics["policy/clipfrac_avg"] == pytest.approx(share)
    every = whole.metrics["policy/clipfrac_avg"]
    assert logged(trainer)["clip_ratio/region_mean"] == pytest.approx(every)
    # Of CISPO's weights it counts those of good completions, though all are capped.
    trainer = of_case(said, tmp_path, CASES["cispo"])
    inputs = step_of(trainer, given).inputs
    out = through_covey(CASES["cispo"], inputs, given.now, given.entropy)
    capped = trained_tokens(inputs) & ((given.now - given.old).exp() > 1.3)
    tokens = trained_tokens(inputs).sum()
    good = (capped & (out.advantage > 0)).sum()
    assert logged(trainer)["cispo_clip_ratio"] == pytest.approx(float(good / tokens))
    assert out.metrics["policy/clipfrac_high"] == pytest.approx(float(capped.sum() / tokens))
    assert 0 < good < capped.sum()


def test_trl_makes_the_correction_part_of_vespo(said: World, given: Given, tmp_path: Path) -> None:
    """Its weight is of now against the sampler; our correction is a factor of its own."""
    mode = {
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.2,
    }
    case = Case({"loss_type": "vespo", **mode}, "vespo", EPS, sampler=True)
    theirs = step_of(of_case(said, tmp_path, case), given)
    merged = given.old - theirs.inputs["importance_sampling_ratio"].log()
    ours = through_covey(case, theirs.inputs, given.now, given.entropy, old_logp=merged)
    assert float(ours.loss) == pytest.approx(float(theirs.loss))
    correction = {"correction": "token_truncate", "correction_high": 1.2}
    apart = through_covey(case, theirs.inputs, given.now, given.entropy, **correction)
    assert abs(float(apart.loss - theirs.loss)) > 1e-3


def test_trl_takes_the_bonus_of_the_mean_entropy_of_tokens(
    said: World, given: Given, tmp_path: Path
) -> None:
    """Whatever the loss; ours is a part of every token's gain, and weighs what that weighs."""
    trl = {"loss_type": "grpo", "entropy_coef": 0.01}
    theirs = step_of(grpo_trainer(said, tmp_path, trl, REWARDS), given)
    plain = through_covey(CASES["grpo"], theirs.inputs, given.now, given.entropy).loss
    bonus = {"entropy_bonus": 0.01}
    ours = through_covey(CASES["grpo"], theirs.inputs, given.now, given.entropy, **bonus).loss
    mask = trained_tokens(theirs.inputs)
    of_tokens = given.entropy[mask].mean()
    of_answers = row_mean(given.entropy, mask).mean()
    assert float(plain - theirs.loss) == pytest.approx(float(0.01 * of_tokens))
    assert float(plain - ours) == pytest.approx(float(0.01 * of_answers))
    assert abs(of_tokens - of_answers) > 1e-3


def test_trl_bounds_no_exponent(said: World, given: Given, tmp_path: Path) -> None:
    """A ratio of e^100, or a reference as far away: ours stop at e^20, without a gradient there."""
    for name, field in (("grpo", "old"), ("grpo, k3", "ref")):
        case = CASES[name]
        far = getattr(given, field).clone()
        row = REWARDS.index(0)  # a bad completion, whose ratio no clip holds from above
        far[row, 0] = given.now[row, 0] + (100.0 if field == "ref" else -100.0)
        moved = given._replace(**{field: far})
        theirs = step_of(of_case(said, tmp_path, case), moved)
        leaves = leaves_of(moved)
        out = through_covey(case, theirs.inputs, *leaves)
        assert theirs.loss > math.exp(80)
        assert theirs.gradient[0, row, 0].abs() > math.exp(80)
        assert 0 < out.loss < math.exp(20)
        assert token_gradients(out.loss, leaves)[0, row, 0].abs() < 1


def test_trl_has_no_gspo_token(said: World, given: Given, tmp_path: Path) -> None:
    trl = {"loss_type": "grpo", "importance_sampling_level": "sequence_token"}
    with pytest.raises(ValueError, match="Unknown importance sampling level"):
        step_of(grpo_trainer(said, tmp_path, trl, REWARDS), given)
