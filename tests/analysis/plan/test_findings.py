"""What a plan finds, and what it does not find."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from covey.analysis.plan.finding import Finding, Seen, setup_of
from covey.analysis.plan.findings import RULES, coincidences, findings
from covey.analysis.plan.look import look
from covey.config import Config, load_config, recipe_names
from covey.objective import ALGORITHMS
from covey.training.build import resolve

ROOT = Path(__file__).parent.parent.parent
ONCE = "train.mini_batches=1"
WIDE_CLIP = ["objective.name=gspo", "objective.clip_low=0.2", "objective.clip_high=0.2"]

# Settings on top of the packaged recipe, the kind of what is found, how its title begins, and
# settings next to these of which nothing is said.
CASES: dict[str, tuple[list[str], str, str, list[str]]] = {
    "dual": ([ONCE, "objective.dual=3.0"], "idle", "objective.dual = 3.0 does nothing", ["objective.dual=3.0"]),
    "off policy limit": (
        [ONCE, "objective.off_policy_limit=0.1"], "idle", "objective.off_policy_limit = 0.1 does nothing",
        [ONCE, "objective.off_policy_limit=0.1", "model.dtype=bfloat16"],
    ),
    "kl_cov": (
        [ONCE, "objective.name=kl_cov"], "idle", "objective.coefficient = 1.0, objective.share = 0.0002 do nothing",
        ["objective.name=kl_cov"],
    ),
    "old_logp": ([ONCE, "train.old_logp=recompute"], "idle", "train.old_logp = 'recompute' is not looked at",
                 ["train.old_logp=recompute"]),
    "old_logp and entropy": (
        ["objective.name=gtpo", "train.old_logp=sampler"], "idle", "train.old_logp = 'sampler' is not looked at",
        ["train.old_logp=sampler"],
    ),
    "sequence clip": (
        [*WIDE_CLIP, "optimizer.learning_rate=1e-5"], "idle",
        "objective.clip_low = 0.2, high = 0.2 hardly ever clip the ratio of a whole answer",
        ["objective.name=gspo", "optimizer.learning_rate=1e-5"],
    ),
    "sequence clip of few updates": (
        [*WIDE_CLIP, "optimizer.learning_rate=1e-6"], "idle",
        "objective.clip_low = 0.2, high = 0.2 hardly ever clip the ratio of a whole answer",
        [*WIDE_CLIP, "optimizer.learning_rate=1e-6", "train.mini_batches=8"],
    ),
    "sequence clip of small steps": (
        [*WIDE_CLIP, "optimizer.learning_rate=1e-6", "train.mini_batches=2"], "idle",
        "objective.clip_low = 0.2, high = 0.2 hardly ever clip the ratio of a whole answer", WIDE_CLIP,
    ),
    "reference without a penalty": (
        ["reference.kind=moving", "reference.alpha=0.5", "objective.kl=k2"], "idle",
        "reference.kind = 'moving', reference.alpha = 0.5, objective.kl = 'k2': not looked at",
        ["reference.kind=moving", "objective.kl=k2", "objective.beta=0.1"],
    ),
    "renewed reference": (
        [ONCE, "reference.kind=renewed", "reference.every=1", "objective.beta=0.1"], "idle",
        "objective.beta = 0.1 does nothing", ["reference.kind=renewed", "reference.every=1", "objective.beta=0.1"],
    ),
    "penalty in an unread reward": (
        ["objective.name=gtpo", "objective.beta=0.1", "objective.kl_in=reward"], "idle",
        "objective.beta = 0.1 does nothing", ["objective.name=gtpo", "objective.beta=0.1"],
    ),
    "horizon": (["objective.kl_horizon=500"], "idle", "objective.kl_horizon = 500.0 is not looked at",
                ["objective.kl_horizon=500", "objective.beta=0.1", "objective.kl_target=0.1"]),
    "far horizon": (
        ["objective.beta=0.1", "objective.kl_target=0.1", "train.steps=20"], "idle",
        "objective.kl_target = 0.1 hardly moves beta", ["objective.beta=0.1", "objective.kl_target=0.1"],
    ),
    "far horizon for so many tokens": (
        ["objective.beta=0.1", "objective.kl_target=0.1", "train.stop_after={tokens=3000}"], "idle",
        "objective.kl_target = 0.1 hardly moves beta",
        ["objective.beta=0.1", "objective.kl_target=0.1", "train.steps=20", "train.stop_after={tokens=100000000}"],
    ),
    "bounds of no correction": (
        ["objective.correction_high=5.0"], "idle", "objective.correction_high = 5.0: not looked at",
        ["objective.correction_high=5.0", "objective.correction=token_mask", "model.dtype=bfloat16"],
    ),
    "nothing to correct": (
        ["objective.correction=token_mask", "objective.veto=1e-3", "model.dtype=float32"], "idle",
        "objective.correction = 'token_mask', objective.veto = 0.001: there is nothing to correct",
        ["objective.correction=token_mask", "model.dtype=float32", "rollout.top_p=0.9"],
    ),
    "skipping": (["filter.skip_zero_gradient=true", "objective.beta=0.1"], "idle",
                 "filter.skip_zero_gradient = True skips nothing", ["filter.skip_zero_gradient=true"]),
    "rounds": (["filter.max_rounds=9"], "idle", "filter.max_rounds = 9 is not looked at",
               ["filter.max_rounds=9", "filter.dynamic_sampling=true"]),
    "age": (["overlap.max_staleness=2"], "idle", "overlap.max_staleness = 2 drops nothing", []),
    "punishment unseen": (
        ["length_penalty.name=soft", "objective.name=gtpo"], "idle",
        "length_penalty.name = 'soft' is not seen by gtpo", ["length_penalty.name=soft"],
    ),
    "punishment out of reach": (
        ["length_penalty.name=soft", "length_penalty.limit=60", "length_penalty.cache=12"], "idle",
        "length_penalty.limit = 60, cache = 12 punish nothing",
        ["length_penalty.name=soft", "length_penalty.limit=60", "length_penalty.cache=13"],
    ),
    "two answers": (["rollout.group_size=2"], "idle", "rollout.group_size = 2: every advantage is +-0.71",
                    ["rollout.group_size=2", "objective.name=dr_grpo"]),
    "adapter": (["adapter.alpha=16"], "idle", "adapter.alpha = 16: not looked at", ["adapter.alpha=16", "adapter.rank=8"]),
    "scoring": (["scoring.workers=3"], "idle", "scoring.workers = 3: not looked at",
                ["scoring.workers=3", "reward.name=code_tests"]),
    "no rate": (["optimizer.learning_rate=0"], "risk", "optimizer.learning_rate = 0: no weight changes", []),
    "warm-up": (["optimizer.warmup_steps=400"], "risk", "optimizer.warmup_steps = 400 is not over",
                ["optimizer.warmup_steps=399"]),
    "cold": (["rollout.temperature=0.3"], "risk", "rollout.temperature = 0.3 lets the answers of a group agree",
             ["rollout.temperature=0.6"]),
    "greedy": (["rollout.top_k=1"], "risk", "rollout.top_k = 1 lets the answers of a group agree", []),
    "truncated": (["rollout.top_p=0.9"], "risk", "rollout.top_k, top_p or min_p cut the distribution",
                  ["rollout.top_p=0.9", "objective.correction=token_truncate"]),
    "form": (
        ["reward.name=think_answer_form", "filter.dynamic_sampling=true"], "risk",
        "filter.dynamic_sampling = True asks which answers are right", ["reward.name=think_answer_form"],
    ),
    "k1": (["objective.beta=0.1", "objective.kl=k1"], "risk", "objective.kl = 'k1' in the loss does not pull",
           ["objective.beta=0.1", "objective.kl=k3"]),
    "standardized penalty": (
        ["objective.beta=0.1", "objective.kl=k1", "objective.kl_in=reward"], "risk",
        "objective.beta = 0.1 is divided by the deviation", ["objective.name=rloo"],
    ),
    "cut groups": (["rollout.prompts_per_step=2", "train.mini_batches=4"], "risk",
                   "train.mini_batches = 4 cuts groups: an optimizer step has 4 answers, a group 8",
                   ["rollout.prompts_per_step=4", "train.mini_batches=4"]),
    "tight clip": (["objective.clip_low=3e-4", "objective.clip_high=4e-4"], "risk",
                   "objective.clip_low = 0.0003, high = 0.0004 clip the ratios of tokens",
                   [ONCE, "objective.clip_low=3e-4", "objective.clip_high=4e-4"]),
    "few prompts": (["evaluate.prompts=119"], "risk", "119 held-out prompts cannot show a difference of 5%",
                    ["evaluate.prompts=120"]),
}  # fmt: skip


def config_of(*settings: str) -> Config:
    return resolve(load_config("arithmetic", ["model.device=cpu", *settings]))


def said(*settings: str, seen: Seen | None = None) -> list[Finding]:
    """Return findings but for what is merely the same."""
    return [f for f in findings(config_of(*settings), seen) if f.kind != "same"]


@pytest.mark.parametrize("case", CASES)
def test_a_setting_that_does_nothing_or_harms_is_found(case: str) -> None:
    settings, kind, title, near = CASES[case]
    (finding,) = said(*settings)
    assert (finding.kind, finding.title[: len(title)]) == (kind, title)
    assert said(*near) == []


def test_every_rule_finds_something_in_some_case() -> None:
    setups = [setup_of(config_of(*settings)) for settings, *_ in CASES.values()]
    setups.append(setup_of(config_of(), Seen(solutions=(999,))))
    silent = [rule.__name__ for rule in RULES if not any(list(rule(setup)) for setup in setups)]
    assert silent == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_nothing_is_said_of_an_algorithm_with_the_packaged_recipe(name: str) -> None:
    found = [finding.title for finding in said(f"objective.name={name}")]
    assert found == []


def test_nothing_is_said_of_the_defaults() -> None:
    config = resolve(load_config("arithmetic"))
    assert findings(config, look(config)) == []
    assert [f.kind for f in findings(resolve(Config()))] == ["same"]


def test_right_answers_that_do_not_fit() -> None:
    config = config_of("rollout.max_tokens=24")
    seen = look(config)
    assert (seen.held_out, len(seen.solutions)) == (256, 64)
    assert max(seen.solutions) <= 48  # they fit into the recipe's
    cut = sum(length > 24 for length in seen.solutions)
    (finding,) = (f for f in findings(config, seen) if f.kind == "risk")
    assert (
        finding.title == f"rollout.max_tokens = 24 cuts off the right answer to {cut} of 64 prompts"
    )
    assert said("rollout.max_tokens=24") == []  # nothing is said of what is not known
    assert said("rollout.max_tokens=24", seen=Seen(solutions=(24, 24, 24, 25, 24))) == []


def test_one_update_names_the_algorithms_that_coincide() -> None:
    (finding,) = findings(config_of(ONCE, "objective.name=gspo", "objective.beta=0.04"))
    assert finding.kind == "same"
    assert finding.title == (
        "with one update per rollout gspo is the same as grpo, gspo_token, gmpo, sapo"
    )
    assert findings(config_of(ONCE, "objective.name=dr_grpo")) == []


def test_a_limit_of_drift_tells_arms_apart_where_sampler_and_trainer_differ() -> None:
    limited = (ONCE, "objective.off_policy_limit=0.001")
    for dtype, alike in (("float32", 1), ("bfloat16", 0)):
        arms = {
            name: config_of(*settings, f"model.dtype={dtype}")
            for name, settings in (("a", (ONCE,)), ("b", limited))
        }
        assert len(coincidences(arms)) == alike


def test_a_finding_is_plain_data_and_one_line() -> None:
    (finding,) = said("optimizer.learning_rate=0")
    assert list(finding.row()) == ["kind", "title", "why", "remedy", "docs"]
    assert all(isinstance(value, str) and value for value in finding.row().values())
    assert finding.line() == f"{finding.title}: {finding.remedy}"
    assert "\n" not in finding.line()


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_what_a_finding_refers_to_is_there() -> None:
    found = [f for settings, *_ in CASES.values() for f in findings(config_of(*settings))]
    found += findings(config_of("rollout.max_tokens=8"), Seen(solutions=(9,)))
    once = {n: config_of(ONCE, f"objective.name={n}", "objective.beta=0")
            for n in ("grpo", "gspo", "dr_grpo", "rloo")}  # fmt: skip
    found += [
        *coincidences(once),
        *coincidences({"a": config_of(), "b": config_of("save.every=3")}),
    ]
    pages = {f.docs for f in found}
    assert len(pages) >= 10
    for reference in pages:
        page, _, anchor = reference.partition("#")
        assert anchor in anchors(ROOT / page), reference


def test_every_packaged_recipe_can_be_looked_at() -> None:
    for name in recipe_names():
        assert all(f.title and f.remedy for f in findings(resolve(load_config(name))))
