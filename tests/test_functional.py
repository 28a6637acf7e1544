"""The functional interface: what it takes, what it gives, and what it says when something is wrong."""

from __future__ import annotations

import math
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import covey.functional
from covey.config.algorithm_names import PAIRED
from covey.errors import ConfigError
from covey.functional import LossOutput, advantages, loss
from covey.objective import ALGORITHMS
from covey.records.metric_registry import meaning

ROWS, WIDTH = 8, 5
REQUIRED = ("logp", "old_logp", "mask", "rewards", "group")
# What each algorithm needs beside these, with the options that it has by default.
NEEDS = {
    "grpo": ["ref_logp"],
    "rloo": ["ref_logp"],
    "reinforce_pp": ["ref_logp"],
    "gtpo": ["entropy"],
    "grpo_s": ["entropy"],
    "gtpo_trajectory": ["entropy", "tokens"],
    "gdpo": ["parts"],
    "decoupled_ppo": ["sampler_logp"],
    "scalerl": ["sampler_logp"],
    "bapo": ["sampler_logp"],
    "m2po": ["sampler_logp"],
    "dppo": ["sampler_logp"],
    "gigpo": ["turn", "state"],
    "opd": ["teacher_logp"],
    "sdpo": ["teacher_logp"],
    "ppo": ["ref_logp", "values"],
    "dpo": ["ref_logp"],
    "ipo": ["ref_logp"],
}
# What an algorithm reads if it is there.
OPTIONAL = {
    "gigpo": ["turn_reward"],
    "clip_cov": ["sampler_logp"],
    "ppo": ["new_values"],
    "gtpo": ["success"],
    "grpo_s": ["success"],
}
TO_SAMPLER = ("scalerl", "bapo", "m2po", "dppo")
OPTIONS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"length": 12},
    "maxrl": {"length": 12},
    "pkpo": {"length": 12, "k": 2},
}
WITHOUT_GROUPS = ("reinforce_pp", "opd", "sdpo", "ppo")
EVERY = pytest.mark.parametrize("name", ALGORITHMS)


def step(dtype: torch.dtype = torch.float64, **changes: Any) -> dict[str, torch.Tensor]:
    """Return every tensor there is: three groups, interleaved, and one answer without a token."""
    generator = torch.Generator().manual_seed(3)

    def uniform(clip_low: float, clip_high: float) -> torch.Tensor:
        values = torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        return (clip_low + (clip_high - clip_low) * values).to(dtype)

    old_logp = uniform(-2.5, -0.5)
    tensors = {
        "logp": old_logp + uniform(-0.4, 0.4),
        "old_logp": old_logp,
        "ref_logp": old_logp + uniform(-0.4, 0.4),
        "sampler_logp": old_logp + uniform(-0.2, 0.2),
        "teacher_logp": old_logp + uniform(-0.5, 0.5),
        "entropy": uniform(0.05, 0.6),
        "values": 0.4 * torch.ones(ROWS, WIDTH).cumsum(dim=1).to(dtype) / WIDTH,
        "parts": uniform(0.0, 1.0)[:, :2],
        "tokens": torch.randint(0, 3, (ROWS, WIDTH), generator=generator),
        "turn": torch.tensor([0, 0, 1, 1, 2]).expand(ROWS, WIDTH),
        "state": torch.tensor([7, 7, 8, 8, 7]).expand(ROWS, WIDTH),
        "turn_reward": torch.tensor([0.5, 0.5, -0.2, -0.2, 0.1]).expand(ROWS, WIDTH),
        "mask": torch.arange(WIDTH) < torch.tensor([5, 4, 3, 1, 0, 2, 5, 3])[:, None],
        "rewards": torch.tensor([1.0, 0.0, 0.3, 0.0, 1.0, 0.0, 0.0, 2.0], dtype=torch.float64),
        "group": torch.tensor([0, 1, 2, 0, 1, 2, 1, 0]),
    }
    return {**tensors, **changes}


def only(given: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Leave out what an algorithm does not read."""
    optional = [key for key in OPTIONAL.get(name, []) if key in given]
    return {key: given[key] for key in (*REQUIRED, *NEEDS.get(name, []), *optional)}


def run(name: str, given: dict[str, torch.Tensor], **options: Any) -> tuple[LossOutput, Any]:
    """Return what `loss` gives, and the gradient."""
    logp = given["logp"].detach().clone().requires_grad_()
    out = loss(name, **{**given, "logp": logp}, **{**OPTIONS.get(name, {}), **options})
    out.loss.backward()
    return out, logp.grad


def refused(name: str, given: dict[str, torch.Tensor], **options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        loss(name, **given, **{**OPTIONS.get(name, {}), **options})
    assert isinstance(raised.value, ValueError)
    message = str(raised.value)
    assert "\n" not in message
    return message


@EVERY
def test_an_algorithm_needs_no_more_than_it_says(name: str) -> None:
    given = only(step(), name)
    out, gradient = run(name, given)
    everything, same = run(name, step())
    assert torch.equal(out.loss, everything.loss)
    assert torch.equal(gradient, same)
    assert out.loss.isfinite()
    assert gradient.any()
    assert not gradient[~given["mask"]].any()
    for needed in NEEDS.get(name, []):
        given_less = {k: v for k, v in given.items() if k != needed}
        assert refused(name, given_less).startswith(
            f"this objective needs the argument {needed}, because "
        )


@pytest.mark.parametrize(
    ("name", "options", "missing", "message"),
    [
        ("grpo", {}, "ref_logp", "this objective needs the argument ref_logp, because its beta is not 0"),
        ("dapo", {"beta": 0.1}, "ref_logp", "this objective needs the argument ref_logp, because its beta is not 0"),
        ("gtpo", {}, "entropy", "this objective needs the argument entropy, because it reads entropies"),
        ("dapo", {"top_entropy": 0.2}, "entropy", "this objective needs the argument entropy, because it reads entropies"),
        ("dapo", {"entropy_bonus": 0.1}, "entropy", "this objective needs the argument entropy, because it reads entropies"),
        ("gtpo_trajectory", {}, "tokens", "this objective needs the argument tokens, because it compares tokens"),
        ("dapo", {"correction": "token_mask"}, "sampler_logp", "this objective needs the argument sampler_logp, because it compares the policy with the sampler"),
        ("dapo", {"veto": 0.1}, "sampler_logp", "this objective needs the argument sampler_logp, because it compares the policy with the sampler"),
        ("dapo", {"off_policy_limit": 0.1}, "sampler_logp", "this objective needs the argument sampler_logp, because it compares the policy with the sampler"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_needed_is_asked_for(
    name: str, options: dict[str, Any], missing: str, message: str
) -> None:
    given = {k: v for k, v in step().items() if k != missing}
    assert refused(name, given, **options) == message
    assert run(name, step(), **options)[0].loss.isfinite()


# The inputs of shape [B, T] that an algorithm's loss reacts to, beside logp, mask, rewards, group
# and those that it needs or may have. The surrogates of the others have no ratio to old_logp.
WITHOUT_RATIO = ("gpg", "gtpo_trajectory", "dpo", "ipo", *TO_SAMPLER)


def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return another value of an input of `loss`, for every row or token by another amount."""
    if name == "group":
        return tensor.roll(1)
    if name in ("success", "mask"):
        return tensor.roll(1, dims=0)
    generator = torch.Generator().manual_seed(len(name))
    if name in ("tokens", "turn", "state"):
        return torch.randint(0, 3, tensor.shape, generator=generator)
    return tensor + 0.3 * torch.rand(tensor.shape, generator=generator).to(tensor.dtype)


def inputs_named_on_the_page(name: str) -> set[str]:
    """Return the log-probs that an algorithm's formulas name, and the tensors of its line `needs`."""
    page = (Path(__file__).parent.parent / f"docs/algorithms/{name}.md").read_text()
    formulas = "".join(re.findall(r"```\n(.*?)```", page, re.DOTALL))
    named = set(re.findall(r"\b(?:old|ref|sampler|teacher)_logp\b", formulas))
    (needs,) = re.findall(r"^\| needs \| (.*) \|$", page, re.MULTILINE)
    shown = {
        "reference": "ref_logp", "entropy": "entropy", "success": "success", "tokens": "tokens",
        "reward parts": "parts", "teacher": "teacher_logp", "critic": "values",
        "sampler_logp": "sampler_logp", "turns": "turn", "states": "state",
    }  # fmt: skip
    return named | {shown[need] for need in needs.split(", ") if need in shown}


@EVERY
def test_a_loss_reacts_to_every_input_that_its_page_names(name: str) -> None:
    given = step() | {"success": step()["rewards"] > 0.5}
    given["rollout"] = torch.arange(ROWS)
    if name == "ppo":
        given["new_values"] = given["values"] + 0.1
    options = {
        "bapo": {"target": 0.7},
        "clip_cov": {"share": 0.2, "cov_low": -0.5},
        "kl_cov": {"share": 0.2},
        "gfpo": {"keep": 2},
        "dppo": {"clip_low": 0.02, "clip_high": 0.02},
        "dpo": {"beta": 0.3},
        "grpo_s": {"clip_low": 0.02, "clip_high": 0.02},
    }.get(name, {})

    def changed(key: str) -> bool:
        before, after = (
            (run(name, each, **options), each)
            for each in (given, {**given, key: moved(key, given[key])})
        )
        (out, gradient), _ = before
        (other, another), _ = after
        value = [out.value_loss, other.value_loss]
        by_critic = value[0] is not None and not torch.equal(value[0], value[1])
        return by_critic or not (
            torch.equal(out.loss, other.loss) and torch.equal(gradient, another)
        )

    reads = {"logp", "mask", "rewards", "group"}
    reads |= {*NEEDS.get(name, []), *OPTIONAL.get(name, [])}
    reads |= set() if name in WITHOUT_RATIO else {"old_logp"}
    if name in ("opd", "sdpo"):  # the teacher's word is all: neither rewards nor groups
        reads -= {"rewards", "group"}
    if name in ("reinforce_pp", "ppo"):
        reads -= {"group"}
    if name == "gtpo_trajectory":  # exp(logp - sg(logp)): whatever logp is, its gradient is A
        reads -= {"logp"}
    if name in ("gtpo", "grpo_s", "gdpo"):  # success and parts take the place of rewards
        reads -= {"rewards"}
    tensors = [key for key in given if key != "rollout"]
    assert {key for key in tensors if changed(key)} == reads
    assert inputs_named_on_the_page(name) <= reads
    if name in ("opd", "sdpo"):  # every token stands alone
        return
    cut = given | {"rollout": torch.arange(ROWS) // 2, "group": torch.arange(ROWS) // 4}
    cut["rewards"] = given["rewards"][::2].repeat_interleave(2)
    if given["parts"].ndim == 2:
        cut["parts"] = given["parts"][::2].repeat_interleave(2, dim=0)
    cut["success"] = cut["rewards"] > 0.5
    whole = {**cut, "rollout": torch.arange(ROWS)}
    assert not torch.equal(run(name, cut, **options)[1], run(name, whole, **options)[1])


@pytest.mark.parametrize("name", TO_SAMPLER)
def test_ratios_to_the_sampler_read_sampler_logp(name: str) -> None:
    given = step()
    without = {key: value for key, value in given.items() if key != "old_logp"}
    out, gradient = run(name, given)
    same, again = run(name, without)  # old_logp serves for metrics only
    assert torch.equal(out.loss, same.loss)
    assert torch.equal(gradient, again)
    assert "debug/sampler_kl" in out.metrics
    assert "debug/sampler_kl" not in same.metrics
    x = (given["logp"] - given["sampler_logp"])[given["mask"]]
    assert out.metrics["val/ratio"] == pytest.approx(float(x.exp().mean()))
    shifted, _ = run(name, {**given, "sampler_logp": given["sampler_logp"] - 1.0})
    ratio = float((x + 1.0).exp().mean())
    assert shifted.metrics["val/ratio"] == pytest.approx(ratio)


def test_an_algorithm_without_a_ratio_to_the_sampler_needs_old_logp() -> None:
    given = {key: value for key, value in step().items() if key != "old_logp"}
    assert "old_logp" in refused("dapo", given)


def test_clip_cov_counts_the_tokens_that_lost_their_gradient() -> None:
    options = {"share": 0.2, "cov_low": -0.5, "clip_low": 0.2, "clip_high": 0.2}
    out, gradient = run("clip_cov", step(), **options)
    mask = step()["mask"]
    lost = mask & (gradient == 0) & (out.advantage != 0)
    clipped, _ = run("dapo", step(), clip_high=0.2)
    assert 0 < clipped.metrics["policy/clipfrac_avg"] < out.metrics["policy/clipfrac_avg"]
    share = float(lost.sum() / mask.sum())
    assert out.metrics["policy/clipfrac_avg"] == pytest.approx(share)


def test_conflict_tokens_are_found_across_gaps() -> None:
    """The good completion is 1 2 3 9 and the bad one 1 2 4 9; a turn's end may lie between."""
    nan = math.nan
    rows = [[1, nan, nan, 2, 3, 9], [1, 2, 4, nan, 9, nan]]  # nan: a token that is not trained
    tokens = torch.tensor(rows).nan_to_num(nan=5.0).long()
    found = advantages(
        "gtpo_trajectory", mask=~torch.tensor(rows).isnan(), tokens=tokens, group=torch.zeros(2),
        rewards=torch.tensor([1.0, 0.0]), entropy=torch.zeros(2, 6),
    )  # fmt: skip
    third = 0.5 / 3  # A_i over the three conflict tokens 1, 2 and 9
    expected = [[2 * third, 0, 0, 2 * third, third, 2 * third], [0, 0, -third, 0, 0, 0]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_scalerl_is_its_formula() -> None:
    """Token by token in plain Python, with the weight of the policy to the sampler."""
    given = {k: v.tolist() for k, v in step().items()}
    groups: dict[int, list[int]] = {}
    for row, number in enumerate(given["group"]):
        groups.setdefault(number, []).append(row)
    centred = [0.0] * ROWS
    for rows in groups.values():
        mean = sum(given["rewards"][row] for row in rows) / len(rows)
        for row in rows:
            centred[row] = given["rewards"][row] - mean
    std = math.sqrt(sum(c * c for c in centred) / (ROWS - 1))  # every group is mixed
    total, capped = 0.0, 0
    for rows in groups.values():
        tokens = [(i, t) for i in rows for t in range(WIDTH) if given["mask"][i][t]]
        for i, t in tokens:
            weight = math.exp(given["logp"][i][t] - given["sampler_logp"][i][t])
            capped += weight > 1.1
            gain = min(weight, 1.1) * centred[i] / (std + 1e-6) * given["logp"][i][t]
            total -= gain / len(tokens) / len(groups)
    assert capped >= 3
    out, _ = run("scalerl", step(), max_weight=1.1)
    assert out.loss.item() == pytest.approx(total, rel=1e-13)


def test_dppo_measures_from_the_sampler_or_from_the_trainer() -> None:
    """Token by token in plain Python, with both anchors."""
    given = {k: v.tolist() for k, v in step().items()}
    advantage = run("dapo", step())[0].advantage
    for anchor in ("sampler_logp", "old_logp"):
        total, dropped, tokens = 0.0, 0, 0
        for i in range(ROWS):
            for t in range(WIDTH):
                if not given["mask"][i][t]:
                    continue
                tokens += 1
                a, logp, start = float(advantage[i, t]), given["logp"][i][t], given[anchor][i][t]
                rise = math.exp(logp) - math.exp(start)
                keep = rise <= 0.03 if a > 0 else rise >= -0.03
                dropped += a != 0 and not keep
                total -= keep * math.exp(logp - start) * a * logp
        assert dropped >= 3
        bounds = {"clip_low": 0.03, "clip_high": 0.03}
        out, _ = run("dppo", step(), anchor=anchor, **bounds)
        assert out.loss.item() == pytest.approx(total / tokens, rel=1e-13)
        assert out.metrics["policy/clipfrac_avg"] == pytest.approx(dropped / tokens)
    default, named = run("dppo", step())[0], run("dppo", step(), clip_low=0.15, clip_high=0.15)[0]
    assert torch.equal(default.loss, named.loss)


def test_gigpo_compares_turns_in_equal_states() -> None:
    given = step()
    gigpo, grpo = run("gigpo", given)[0], run("grpo", given, beta=0.0)[0]
    assert not torch.equal(gigpo.advantage, grpo.advantage)
    alone = {**given, "state": torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)}
    alone["turn"] = torch.zeros(ROWS, WIDTH, dtype=torch.long)
    alone["state"] = alone["state"][:, :1].expand(ROWS, WIDTH)
    torch.testing.assert_close(run("gigpo", alone)[0].advantage, grpo.advantage)
    # Two rollouts of one turn in one state: A_S is A_E, of rewards that are standardized.
    pair = {"turn": alone["turn"], "state": torch.full((ROWS, WIDTH), 3)}
    twice = run("gigpo", {**given, **pair, "turn_reward": torch.zeros(ROWS, WIDTH)})[0]
    whole = given["group"] != 1  # in group 1, a rollout without tokens has no turn
    torch.testing.assert_close(twice.advantage[whole], 2 * grpo.advantage[whole])


def test_an_option_without_a_default_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"^algorithm dr_grpo needs the option 'length'$"):
        loss("dr_grpo", **only(step(), "dr_grpo"))


def test_an_option_that_is_not_there_is_answered_with_those_that_are() -> None:
    shared = (
        "kl_in, kl_target, kl_horizon, entropy_bonus, top_entropy, correction, correction_low, "
        "correction_high, correction_mean_one, veto, off_policy_limit"
    )
    assert refused("gspo", step(), dual=3.0) == (
        f"algorithm gspo has no option 'dual'; its options are clip_low, clip_high, beta, kl, ddof, eps, {shared}"
    )
    assert refused("gropo", step()) == (
        "config: objective.name = 'gropo' is not a known algorithm; did you mean 'grpo'?"
    )


@pytest.mark.parametrize(
    "tensor", [*sorted({*step(), "success"} - {"mask"}), "mask, flat", "mask, wide"]
)
def test_a_wrong_shape_is_told_from_the_right_one(tensor: str) -> None:
    given = step(success=torch.ones(ROWS))
    if tensor == "mask, flat":
        given["mask"] = given["mask"][:, 0]
        assert refused("dapo", given) == "the tensor mask must have the shape [B, T], not [8]"
    elif tensor == "mask, wide":
        given["mask"] = torch.ones(ROWS, WIDTH + 1)
        assert refused("dapo", given) == "the tensor logp must have the shape [8, 6], not [8, 5]"
    elif tensor == "parts":  # as many as there are, of each row
        message = "the tensor parts must have the shape [8, 2], not [1, 2]"
        assert refused("dapo", {**given, tensor: given[tensor][:1]}) == message
    elif given[tensor].ndim == 1:
        given[tensor] = given[tensor][:, None]
        assert refused("dapo", given) == f"the tensor {tensor} must have the shape [8], not [8, 1]"
    else:
        # Either would be broadcast without a word.
        for part in (given[tensor][:, :1], given[tensor][:1]):
            message = f"the tensor {tensor} must have the shape [8, 5], not {list(part.shape)}"
            assert refused("dapo", {**given, tensor: part}) == message


@EVERY
def test_a_group_of_one_is_refused_where_answers_are_compared(name: str) -> None:
    given = step(group=torch.tensor([0, -4, 0, 0, 1, 1, 1, 1]))
    if name in WITHOUT_GROUPS:
        assert run(name, given)[1].any()
    else:
        message = "group -4 has only one completion; a group needs at least two completions"
        assert refused(name, given) == message


def test_a_large_group_with_a_small_integer_as_its_name_is_not_alone() -> None:
    given = {k: v.repeat(33, *[1] * (v.ndim - 1))[:257] for k, v in step().items()}
    out, _ = run("dapo", {**given, "group": torch.zeros(257, dtype=torch.uint8)})
    assert out.advantage.any()


@EVERY
def test_rows_may_stand_in_any_order(name: str) -> None:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    out, gradient = run(name, step())
    moved, moved_gradient = run(name, {k: v[order] for k, v in step().items()})
    torch.testing.assert_close(moved.loss, out.loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(moved_gradient, gradient[order], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(moved.advantage, out.advantage[order], rtol=1e-12, atol=1e-14)
    assert torch.equal(moved.weight, out.weight[order])


@EVERY
@pytest.mark.parametrize("names", [(-7, 2**62, 0), (5, -(2**63), 2**63 - 1), (250, 3, 9)])
def test_groups_may_have_any_names(name: str, names: tuple[int, int, int]) -> None:
    kind = torch.uint8 if names[0] == 250 else torch.int64
    renamed = torch.tensor(names, dtype=torch.int64)[step()["group"]].to(kind)
    out, gradient = run(name, step())
    again, same = run(name, step(group=renamed))
    torch.testing.assert_close(again.loss, out.loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(same, gradient, rtol=1e-12, atol=1e-14)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_log_probabilities_of_any_float_type(name: str, dtype: torch.dtype) -> None:
    given = step(dtype)
    out, gradient = run(name, given)
    precise = {k: v.double() if v.dtype == dtype else v for k, v in given.items()}
    exact, exact_gradient = run(name, precise)
    assert gradient.dtype == dtype
    assert out.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (out.advantage.dtype, out.weight.dtype) == (torch.float64, torch.float64)
    # Only the gradient is rounded to the narrow type, at the very end.
    torch.testing.assert_close(out.loss.double(), exact.loss, rtol=1e-5, atol=1e-6)
    rounding = max(1e-5, torch.finfo(dtype).eps)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=rounding, atol=1e-6)


@EVERY
@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_a_mask_is_true_where_it_is_not_0(name: str, kind: torch.dtype) -> None:
    out, gradient = run(name, step())
    again, same = run(name, step(mask=step()["mask"].to(kind) * 2))
    assert torch.equal(again.loss, out.loss)
    assert torch.equal(same, gradient)
    assert again.metrics == out.metrics


@EVERY
def test_what_stands_outside_the_mask_changes_nothing(name: str) -> None:
    given = step()
    mask, spoilt = given["mask"], dict(given)
    names = ("logp", "old_logp", "ref_logp", "sampler_logp", "teacher_logp", "entropy", "values")
    for key in names:
        spoilt[key] = given[key].where(mask, math.nan)
    spoilt["tokens"] = given["tokens"].where(mask, -1)
    options = {"beta": 0.1, "correction": "token_truncate", "entropy_bonus": 0.1}
    if name in PAIRED:
        del options["correction"]
    out, gradient = run(name, given, **options)
    again, same = run(name, spoilt, **options)
    assert torch.equal(again.loss, out.loss)
    assert torch.equal(same, gradient)
    assert again.metrics == out.metrics


@EVERY
def test_an_answer_without_tokens_has_neither_advantage_nor_weight(name: str) -> None:
    out, gradient = run(name, step())
    empty = ~step()["mask"].any(dim=1)
    assert empty.tolist() == [False] * 4 + [True] + [False] * 3
    assert not out.advantage[empty].any()
    assert not out.weight[empty].any()
    assert not gradient[empty].any()


@EVERY
@pytest.mark.parametrize("what", ["no trained token", "no column", "no row"])
def test_a_step_without_tokens_has_loss_0(name: str, what: str) -> None:
    given = step()
    if what == "no trained token":
        given["mask"] = torch.zeros(ROWS, WIDTH)
    elif what == "no column":
        given = {k: v[:, :0] if v.shape[1:] == (WIDTH,) else v for k, v in given.items()}
    else:
        given = {k: v[:0] for k, v in given.items()}
    out, gradient = run(name, given)
    assert out.loss == 0.0
    assert gradient.shape == given["logp"].shape
    assert not gradient.any()


@EVERY
def test_an_answer_that_was_not_scored_has_no_advantage_from_rewards(name: str) -> None:
    rewards = step()["rewards"]
    rewards[2] = math.nan
    out, gradient = run(name, step(rewards=rewards))
    assert out.advantage[2].any() == (
        name in ("opd", "sdpo")
    )  # the teacher's word holds without a reward
    assert out.advantage.any()
    assert gradient.isfinite().all()


def test_an_unscored_answer_shrinks_no_other() -> None:
    rewards = step()["rewards"]
    rewards[0] = math.nan  # five tokens of 23, one answer of 8
    for name, tokens in (("dapo", 23), ("grpo", 8)):
        out, gradient = run(name, step(rewards=rewards), beta=0.0)
        rest = [n for n in range(ROWS) if n != 0]
        others = {key: value[rest] for key, value in step().items()}
        wanted, same = run(name, others, beta=0.0)
        assert out.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-14)
        torch.testing.assert_close(gradient[rest], same, rtol=1e-13, atol=0.0)
        assert not gradient[0].any()
        whole, part = run(name, step(), beta=0.0)[0].weight[1, 0], out.weight[1, 0]
        assert part / whole == pytest.approx(tokens / (tokens - (5 if name == "dapo" else 1)))
    # A teacher needs no reward: the answer still counts.
    taught, _ = run("opd", step(rewards=rewards))
    assert torch.equal(taught.weight, run("opd", step())[0].weight)


@EVERY
def test_advantages_are_those_of_the_loss(name: str) -> None:
    given = step()
    out, _ = run(name, given)
    needed = {k: given[k] for k in ("mask", "rewards", "group", *NEEDS.get(name, []))}
    if name == "gigpo":
        needed["turn_reward"] = given["turn_reward"]
    if name in ("rloo", "reinforce_pp", "ppo"):
        with pytest.raises(
            ConfigError,
            match=f"^{name} needs old_logp, because it subtracts the KL penalty from the reward$",
        ):
            advantages(name, **needed)
        needed["old_logp"] = given["old_logp"]
    elif name in ("opd", "sdpo"):
        with pytest.raises(
            ConfigError,
            match=f"^{name} needs old_logp, because it compares old_logp with the log-probs of the teac",
        ):
            advantages(name, **needed)
        needed["old_logp"] = given["old_logp"]
    elif name == "grpo":
        del needed["ref_logp"]  # the KL is in the loss
    elif name in ("decoupled_ppo", *TO_SAMPLER):
        del needed["sampler_logp"]  # so is the correction
    result = advantages(name, **needed, **OPTIONS.get(name, {}))
    assert result.dtype == torch.float64
    assert torch.equal(result, out.advantage)
    if name == "grpo":
        # What only the loss needs is not asked for.
        more = {
            "correction": "token_mask",
            "veto": 0.1,
            "off_policy_limit": 1.0,
            "entropy_bonus": 1.0,
        }
        assert torch.equal(advantages(name, **needed, **more), result)


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_an_answer_is_right_if_its_reward_is_positive_unless_told_otherwise(name: str) -> None:
    given = step()
    out, _ = run(name, given)
    told, _ = run(name, given, success=given["rewards"] > 0)
    assert torch.equal(out.advantage, told.advantage)
    # Numbers do as well; a reward of 0.3 may be too little.
    other, _ = run(name, given, success=(given["rewards"] > 0.5).long())
    assert out.advantage[2, 0] > 0
    assert other.advantage[2, 0] == 0  # its group is now all wrong
    assert not torch.equal(out.advantage, other.advantage)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        # 23 tokens in 8 answers, of which one has none.
        ("dapo", {}, 1.0),
        ("cispo", {}, 1.0),
        ("dapo", {"aggregation": "group_mean_token_mean"}, 1.0),
        ("grpo", {}, 7 / 8),
        ("gspo", {}, 7 / 8),
        ("gpg", {"aggregation": "sequence_mean_token_mean"}, 7 / 8),
        ("luspo", {}, 23 / 8),
        ("dr_grpo", {}, 23 / (8 * 12)),
        ("dr_grpo", {"length": 5}, 23 / (8 * 5)),
    ],
)
def test_weights_add_up(name: str, options: dict[str, Any], expected: float) -> None:
    out, _ = run(name, step(), **options)
    assert out.weight.sum().item() == pytest.approx(expected, rel=1e-14)
    assert not out.weight[~step()["mask"]].any()


def test_grpo_is_its_formula() -> None:
    """Token by token in plain Python: standardized rewards, the clip, k3, the two means."""
    given = {k: v.tolist() for k, v in step().items()}
    total, gains = 0.0, 0
    for i in range(ROWS):
        rewards = [
            r
            for r, g in zip(given["rewards"], given["group"], strict=True)
            if g == given["group"][i]
        ]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        advantage = (given["rewards"][i] - mean) / (std + 1e-6)
        trained = [t for t in range(WIDTH) if given["mask"][i][t]]
        for t in trained:
            ratio = math.exp(given["logp"][i][t] - given["old_logp"][i][t])
            d = given["logp"][i][t] - given["ref_logp"][i][t]
            gain = min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage)
            gains += gain != ratio * advantage
            total -= (gain - 0.5 * (math.exp(-d) - 1 + d)) / len(trained) / ROWS
    assert gains >= 3  # the clip acts
    out, _ = run("grpo", step(), clip_low=0.1, clip_high=0.3, beta=0.5)
    assert out.loss.item() == pytest.approx(total, rel=1e-13)


def test_the_loss_is_what_advantage_and_weight_say() -> None:
    out, _ = run("grpo", step(), clip_low=0.1, clip_high=0.3, beta=0.0)
    given = step()
    ratio = (given["logp"] - given["old_logp"]).exp()
    gain = torch.minimum(ratio * out.advantage, ratio.clamp(0.9, 1.3) * out.advantage)
    torch.testing.assert_close(out.loss, -(gain * out.weight).sum(), rtol=1e-14, atol=0.0)
    assert not out.advantage.requires_grad
    assert not out.weight.requires_grad


@EVERY
def test_every_metric_has_a_meaning(name: str) -> None:
    some, _ = run(name, only(step(), name))
    options = {
        "beta": 0.1, "correction": "token_mask", "correction_low": 0.9, "off_policy_limit": 0.1,
        "entropy_bonus": 0.1, **({"dual": 3.0} if name == "grpo" else {}),
    }  # fmt: skip
    if name in PAIRED:
        options = {"entropy_bonus": 0.1}
    all_, _ = run(name, step(), **options)
    assert [m for m in (*some.metrics, *all_.metrics) if meaning(m) is None] == []
    assert {"policy/approxkl_avg", "val/ratio", "reward/advantages_mean"} <= some.metrics.keys()
    more = {"policy/entropy_avg", "debug/sampler_kl"}
    more |= set() if name in PAIRED else {"objective/kl_avg", "policy/correction_mean"}
    assert more | some.metrics.keys() <= all_.metrics.keys()
    assert ("policy/clipfrac_dual" in all_.metrics) == (name == "grpo")


def test_metrics_are_over_trained_tokens() -> None:
    given = step()
    mask, x = given["mask"], given["logp"] - given["old_logp"]
    out, _ = run("dapo", given)
    expected = {
        "policy/approxkl_k1": -x[mask].mean(),
        "policy/approxkl_k2": x[mask].square().mean() / 2,
        "val/ratio": x[mask].exp().mean(),
        "val/ratio_max": x[mask].exp().max(),
        "reward/advantages_mean": out.advantage[mask].mean(),
        "reward/advantages_min": out.advantage[mask].min(),
        "policy/entropy_avg": given["entropy"][mask].mean(),
        "debug/sampler_kl": (given["sampler_logp"] - given["old_logp"])[mask].mean(),
    }
    found = {name: out.metrics[name] for name in expected}
    assert found == pytest.approx({k: v.item() for k, v in expected.items()}, rel=1e-12)


def snippets() -> dict[str, str]:
    page = Path(__file__).parent.parent / "docs/algorithms/README.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (fenced,) = [block for block in blocks if "covey.functional" in block]
    indented = re.search(r"\n\n((?:    .*\n)+)", str(covey.functional.__doc__))
    assert indented is not None
    return {"page": fenced, "docstring": textwrap.dedent(indented.group(1))}


@pytest.mark.parametrize(
    ("source", "name", "options"),
    [("page", "gspo", {"clip_high": 5e-4}), ("docstring", "dapo", {"clip_high": 0.3})],
)
def test_the_examples_run_as_they_are_printed(
    source: str, name: str, options: dict[str, float]
) -> None:
    given = step()
    space: dict[str, Any] = {"covey": covey, **{k: given[k] for k in REQUIRED}}
    space["logp"].requires_grad_()
    exec(snippets()[source], space)
    used = {k: space[k].detach() for k in REQUIRED}
    out, gradient = run(name, used, **options)
    assert torch.equal(space["out"].loss, out.loss)
    assert torch.equal(space["logp"].grad, gradient)
