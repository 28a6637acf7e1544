from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from covey.errors import ConfigError
from covey.lab.explain.effect import effect, whole_effect
from covey.lab.explain.recorded import policy_before, read_step
from covey.lab.explain.replay_algorithms import (
    families,
    length_bins,
    multiple,
    objectives,
    parameter_gradients,
    replay,
)
from covey.models.logp import LogProbs
from covey.objective import build as build_objective
from covey.objective import policy_loss, with_advantage, with_weight
from covey.policy.optimizer import MasterAdamW
from covey.policy.policy import Policy
from covey.records.folder import RunFolder
from covey.types import Batch
from tests.conftest import build, make_batch


def make_policy(dtype: torch.dtype = torch.float64) -> Policy:
    model = build("llama", dtype)
    optimizer = MasterAdamW(
        model.model.named_parameters(), betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    return Policy(model=model, optimizer=optimizer, temperature=1.0, logits_megabytes=64.0)


def prepared(seed: int = 3, *, longest: int = 9, moved: float = 0.1) -> tuple[Batch, LogProbs]:
    """Return a batch with everything an objective may need, and log-probs of a moved policy."""
    batch = make_batch(rows=8, groups=2, seed=seed, longest=longest)
    generator = torch.Generator().manual_seed(seed)
    noise = lambda: torch.randn(batch.mask.shape, generator=generator, dtype=torch.float64)  # noqa: E731
    logp = -noise().abs()
    batch = replace(
        batch, old_logp=logp + moved * noise(), ref_logp=logp + 0.3 * noise(),
        entropy=noise().abs(), sampler_logp=batch.sampler_logp.double(),
    )  # fmt: skip
    return batch, LogProbs(logp=logp, entropy=noise().abs())


CASES = {
    "grpo": {"beta": 0.1},
    "gspo": {"clip_low": 0.05, "clip_high": 0.05, "beta": 0.0},
    "dr_grpo": {"length": 9},
    "rloo": {"beta": 0.05},
    "sapo": {},
    "dapo": {"entropy_bonus": 0.3},
}


@pytest.mark.parametrize("name", CASES)
def test_slopes_are_those_of_the_loss(name: str) -> None:
    objective = build_objective(name, **CASES[name])
    batch, now = prepared()
    batch = with_weight(objective, with_advantage(objective, batch))
    found = effect(objective, batch, now)
    assert found.gradient[~batch.mask].eq(0).all()
    for kind, slope in (("logp", found.gradient), ("entropy", found.entropy_gradient)):
        direction = torch.randn(
            batch.mask.shape, generator=torch.Generator().manual_seed(1)
        ).double()
        values = []
        for sign in (1, -1):
            shifted = getattr(now, kind) + sign * 1e-6 * direction
            # Ratios that do not move their gradient (sapo's do) are differentiated through.
            output = policy_loss(objective, batch, *now._replace(**{kind: shifted}))
            values.append(float(output.loss))
        change = (values[0] - values[1]) / 2e-6
        assert change == pytest.approx(float((slope * direction).sum()), rel=1e-5, abs=1e-9)
    assert found.entropy_gradient.any() == (name == "dapo")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("budget", [20, 10_000])
def test_contributions_of_tokens_sum_to_the_gradient_of_the_loss(name: str, budget: int) -> None:
    objective, policy = build_objective(name, **CASES[name]), make_policy()
    batch, _ = prepared()
    with torch.no_grad():
        now = policy.logp(batch)
    batch = replace(batch, old_logp=now.logp + 0.1 * batch.entropy)
    batch = with_weight(objective, with_advantage(objective, batch))
    found = parameter_gradients(policy, batch, {name: effect(objective, batch, now)}, budget)
    output = policy_loss(objective, batch, *policy.logp(batch))
    parameters = list(policy.optimizer.parameters.values())
    direct = torch.cat([g.flatten() for g in torch.autograd.grad(output.loss, parameters)])
    torch.testing.assert_close(found[name].double(), direct, rtol=1e-5, atol=1e-6 * direct.norm())
    assert direct.norm() > 0


def slopes(names: dict[str, dict[str, object]], *, same_length: bool) -> dict[str, torch.Tensor]:
    batch, now = prepared()
    if same_length:
        batch = replace(
            batch, mask=torch.ones_like(batch.mask), lengths=torch.full_like(batch.lengths, 9)
        )
    batch = replace(batch, old_logp=now.logp)
    found = {}
    for name, options in names.items():
        objective = build_objective(name, **options)
        one = whole_effect(objective, with_advantage(objective, batch), now)
        found[name] = one.gradient.flatten()
    return found


def members(found: dict[str, torch.Tensor]) -> list[list[str]]:
    return [[m.name for m in family.members] for family in families(found)]


def test_on_policy_grpo_and_gspo_are_equal_at_all_lengths() -> None:
    names = {"grpo": {"beta": 0.0}, "gspo": {}, "gspo_token": {}}
    for same_length in (True, False):
        found = families(slopes(names, same_length=same_length))
        assert [m.name for m in found[0].members] == list(names)
        assert all(m.factor == pytest.approx(1, abs=1e-12) for m in found[0].members)


def test_length_weights_are_a_factor_if_lengths_are_equal() -> None:
    names = {"grpo": {"beta": 0.0}, "dapo": {}, "luspo": {}}
    assert members(slopes(names, same_length=True)) == [["grpo", "dapo", "luspo"]]
    assert members(slopes(names, same_length=False)) == [["grpo"], ["dapo", "luspo"]]
    family = families(slopes(names, same_length=True))[0]
    # 1/(N T_i) and 1/T are then the same, and 1/N is 9 times as much.
    assert [m.factor for m in family.members] == pytest.approx([1, 1, 9])


def test_a_deviation_is_a_factor_for_each_group() -> None:
    names = {"grpo": {"beta": 0.0}, "dr_grpo": {"length": 9}}
    found = slopes(names, same_length=True)
    assert multiple(found["dr_grpo"], found["grpo"]) is None
    group = torch.arange(8).repeat_interleave(9) % 2
    batch, _ = prepared()
    for number in (0, 1):
        inside = group == number
        factor = multiple(found["dr_grpo"][inside], found["grpo"][inside])
        deviation = float(batch.rewards[batch.group == number].std())
        assert factor == pytest.approx(deviation, rel=1e-4)


def test_zeros_are_a_multiple_of_zeros_only() -> None:
    zeros, ones = torch.zeros(3).double(), torch.ones(3).double()
    assert multiple(zeros, zeros) == 1.0
    assert multiple(zeros, ones) is None
    assert multiple(ones, zeros) is None
    assert multiple(-ones, ones) is None  # the opposite direction is no multiple
    assert multiple(2 * ones, ones) == 2.0
    assert multiple(ones + torch.tensor([1e-3, 0, 0]), ones) is None


def test_length_bins_show_the_weight_of_a_token() -> None:
    batch, now = prepared(longest=30)
    batch = replace(batch, old_logp=now.logp)
    rows = batch.mask.sum(dim=1)
    for name, options, weight in (
        ("dr_grpo", {"length": 50}, lambda tokens: 1 / (8 * 50)),
        ("grpo", {"beta": 0.0}, lambda tokens: 1 / (8 * tokens)),
    ):
        objective = build_objective(name, **options)
        filled = with_advantage(objective, batch)
        bins = length_bins(filled, whole_effect(objective, filled, now).gradient)
        assert sum(b.completions for b in bins) == 8
        assert (bins[0].shortest, bins[-1].longest) == (int(rows.min()), int(rows.max()))
        for b in bins:
            assert weight(b.longest) <= b.per_advantage * (1 + 1e-9)
            assert b.per_advantage <= weight(b.shortest) * (1 + 1e-9)


@pytest.fixture(scope="module")
def replayed(recorded_run: RunFolder):
    built = objectives(recorded_run, ["all"])
    return replay(policy_before(recorded_run, 2), read_step(recorded_run, 2), built)


def test_every_algorithm_replays_a_recorded_step(replayed) -> None:
    first, later = replayed.moments
    assert (first.updates, later.updates) == (0, 2)
    assert len(first.algorithms) == 32
    for moment in replayed.moments:
        cosine = torch.tensor(moment.cosine, dtype=torch.float64)
        torch.testing.assert_close(cosine, cosine.T)
        torch.testing.assert_close(cosine.diagonal(), torch.ones(32).double())
        assert cosine.abs().max() <= 1
        assert all(a.grad_norm > 0 for a in moment.algorithms)
        names = [a.name for a in moment.algorithms]
        assert sorted(m.name for f in moment.families for m in f.members) == sorted(names)
        for family in moment.families:
            rows = [names.index(m.name) for m in family.members]
            assert cosine[rows][:, rows].min() > 1 - 1e-9


def test_clips_act_only_off_policy_and_sequence_clips_act_first(replayed) -> None:
    first, later = replayed.moments
    # clip_cov drops tokens by their covariance, at any ratio.
    assert {a.name for a in first.algorithms if a.clipped} <= {"clip_cov"}
    clipped = {a.name: a.clipped for a in later.algorithms}
    assert clipped["gspo"] > clipped["dapo"] > 0
    assert clipped["gpg"] == clipped["gtpo_trajectory"] == 0
    first_names = [[m.name for m in f.members] for f in first.families]
    # The run's grpo has a KL, which pulls towards the reference from the second step on.
    assert any({"gspo", "gspo_token", "gmpo"} <= set(names) for names in first_names)
    assert any({"dapo", "cispo", "vespo", "dppo"} <= set(names) for names in first_names)
    assert len(later.families) > len(first.families)


def test_cosines_equal_those_of_separate_gradients(recorded_run: RunFolder) -> None:
    names = ["grpo", "dr_grpo", "reinforce_pp"]
    built = objectives(recorded_run, names, ["beta=0.1"])
    assert [o.beta for o in built.values()] == [0.1] * 3
    recorded = read_step(recorded_run, 2)
    trainee = policy_before(recorded_run, 2)
    found = replay(trainee, recorded, built, ["beta=0.1"]).moments[0]

    from covey.collate import collate
    from covey.policy.policy import load_model
    from covey.reference.build import make_reference
    from covey.run import Run
    from covey.step import prepare

    trainee = policy_before(recorded_run, 2)
    parameters = list(trainee.run.policy.optimizer.parameters.values())
    reference = make_reference(
        trainee.run.config,
        policy=trainee.run.policy.model,
        load=lambda: load_model(trainee.run.config),
    )
    gradients = []
    for objective in built.values():
        settings = replace(trainee.run.settings, old_logp_from_sampler=False)
        learner = Run(
            policy=trainee.run.policy, objective=objective, settings=settings, reference=reference
        )
        batch = prepare(learner, collate(recorded.groups))
        batch = with_weight(objective, with_advantage(objective, batch))
        loss = policy_loss(objective, batch, *trainee.run.policy.logp(batch)).loss
        parts = torch.autograd.grad(loss, parameters)
        gradients.append(torch.cat([part.flatten() for part in parts]).double())
    for i, a in enumerate(gradients):
        assert found.algorithms[i].grad_norm == pytest.approx(float(a.norm()), rel=1e-4)
        for j, b in enumerate(gradients):
            expected = float(a @ b / (a.norm() * b.norm()))
            assert found.cosine[i][j] == pytest.approx(expected, abs=1e-4)


def test_the_runs_algorithm_has_the_runs_options_and_others_their_defaults(
    recorded_run: RunFolder,
) -> None:
    built = objectives(recorded_run, ["grpo", "dr_grpo", "gspo"])
    assert built["grpo"].surrogate.keywords["clip_high"] == 0.03
    assert built["gspo"].surrogate.keywords["clip_high"] == 4e-4
    assert built["dr_grpo"].weights.keywords["length"] == 40  # rollout.max_tokens


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["grop"], [], "did you mean 'grpo'"),
        (
            ["grpo", "gspo"],
            ["lenth=3"],
            "--set lenth: none of the algorithms grpo, gspo has this option",
        ),
        (["grpo"], ["beta=-1"], "beta"),
    ],
)
def test_unknown_options_are_errors(
    recorded_run: RunFolder, names: list[str], options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        objectives(recorded_run, names, options)
