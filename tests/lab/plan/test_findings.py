"""Findings about configurations, and configurations without findings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from covey.baselines import Baseline, Baselines
from covey.config import Config, load_config, recipe_names
from covey.config.resolve import resolve
from covey.lab.plan.equivalence import Finding, coincidences, setup_of
from covey.lab.plan.findings import RULES, findings
from covey.lab.plan.task_facts import TaskFacts, task_facts
from covey.objective import ALGORITHMS

ROOT = Path(__file__).parents[3]
ONCE = "train.mini_batches=1"
WIDE_CLIP = ["objective.name=gspo", "objective.clip_low=0.2", "objective.clip_high=0.2"]

# Settings on top of the packaged recipe, the kind of the finding, how its title begins, and similar
# settings without a finding.
CASES: dict[str, tuple[list[str], str, str, list[str]]] = {
    "dual": ([ONCE, "objective.dual=3.0"], "idle", "objective.dual = 3.0 has no effect", ["objective.dual=3.0"]),
    "off policy limit": (
        [ONCE, "objective.off_policy_limit=0.1"], "idle", "objective.off_policy_limit = 0.1 has no effect",
        [ONCE, "objective.off_policy_limit=0.1", "model.dtype=bfloat16"],
    ),
    "kl_cov": (
        [ONCE, "objective.name=kl_cov"], "idle", "objective.coefficient = 1.0, objective.share = 0.0002 have no effect",
        ["objective.name=kl_cov"],
    ),
    "bapo": ([ONCE, "objective.name=bapo"], "idle", "objective.target = 0.4 has no effect", ["objective.name=bapo"]),
    "m2po": (
        [ONCE, "objective.name=m2po"], "idle", "objective.tau = 0.04 has no effect",
        [ONCE, "objective.name=m2po", "model.dtype=bfloat16"],
    ),
    "kept": (["objective.name=gfpo", "objective.keep=8"], "idle", "objective.keep = 8 keeps all completions of a group of 8",
             ["objective.name=gfpo", "objective.keep=7"]),
    "one part": (
        ["objective.name=gdpo", "objective.parts=['correct']"], "idle",
        "objective.parts names one part: gdpo is grpo times a number", ["objective.name=gdpo"],
    ),
    "old_logp": ([ONCE, "train.old_logp=recompute"], "idle", "train.old_logp = 'recompute' has no effect",
                 ["train.old_logp=recompute"]),
    "old_logp and entropy": (
        ["objective.name=gtpo", "train.old_logp=sampler"], "idle", "train.old_logp = 'sampler' has no effect",
        ["train.old_logp=sampler"],
    ),
    "sequence clip": (
        [*WIDE_CLIP, "optimizer.learning_rate=1e-5"], "idle",
        "objective.clip_low = 0.2, clip_high = 0.2 hardly ever clip a sequence-level ratio",
        ["objective.name=gspo", "optimizer.learning_rate=1e-5"],
    ),
    "sequence clip of few updates": (
        [*WIDE_CLIP, "optimizer.learning_rate=1e-6"], "idle",
        "objective.clip_low = 0.2, clip_high = 0.2 hardly ever clip a sequence-level ratio",
        [*WIDE_CLIP, "optimizer.learning_rate=1e-6", "train.mini_batches=8"],
    ),
    "sequence clip of small steps": (
        [*WIDE_CLIP, "optimizer.learning_rate=1e-6", "train.mini_batches=2"], "idle",
        "objective.clip_low = 0.2, clip_high = 0.2 hardly ever clip a sequence-level ratio", WIDE_CLIP,
    ),
    "reference without a penalty": (
        ["reference.kind=moving", "reference.alpha=0.5", "objective.kl=k2"], "idle",
        "reference.kind = 'moving', reference.alpha = 0.5, objective.kl = 'k2': no effect",
        ["reference.kind=moving", "objective.kl=k2", "objective.beta=0.1"],
    ),
    "renewed reference": (
        [ONCE, "reference.kind=renewed", "reference.every=1", "objective.beta=0.1"], "idle",
        "objective.beta = 0.1 has no effect", ["reference.kind=renewed", "reference.every=1", "objective.beta=0.1"],
    ),
    "penalty in an unread reward": (
        ["objective.name=gtpo", "objective.beta=0.1", "objective.kl_in=reward"], "idle",
        "objective.beta = 0.1 has no effect", ["objective.name=gtpo", "objective.beta=0.1"],
    ),
    "horizon": (["objective.kl_horizon=500"], "idle", "objective.kl_horizon = 500.0 has no effect",
                ["objective.kl_horizon=500", "objective.beta=0.1", "objective.kl_target=0.1"]),
    "far horizon": (
        ["objective.beta=0.1", "objective.kl_target=0.1", "train.steps=20"], "idle",
        "objective.kl_target = 0.1 hardly changes beta", ["objective.beta=0.1", "objective.kl_target=0.1"],
    ),
    "far horizon for so many tokens": (
        ["objective.beta=0.1", "objective.kl_target=0.1", "train.stop_after={tokens=3000}"], "idle",
        "objective.kl_target = 0.1 hardly changes beta",
        ["objective.beta=0.1", "objective.kl_target=0.1", "train.steps=20", "train.stop_after={tokens=100000000}"],
    ),
    "bounds of no correction": (
        ["objective.correction_high=5.0"], "idle", "objective.correction_high = 5.0: no effect",
        ["objective.correction_high=5.0", "objective.correction=token_mask", "model.dtype=bfloat16"],
    ),
    "nothing to correct": (
        ["objective.correction=token_mask", "objective.veto=1e-3", "model.dtype=float32"], "idle",
        "objective.correction = 'token_mask', objective.veto = 0.001: there is nothing to correct",
        ["objective.correction=token_mask", "model.dtype=float32", "rollout.top_p=0.9"],
    ),
    "skipping": (["filter.skip_zero_gradient=true", "objective.beta=0.1"], "idle",
                 "filter.skip_zero_gradient = True skips nothing", ["filter.skip_zero_gradient=true"]),
    "rounds": (["filter.max_rounds=9"], "idle", "filter.max_rounds = 9 has no effect",
               ["filter.max_rounds=9", "filter.dynamic_sampling=true"]),
    "age": (["overlap.max_staleness=2"], "idle", "overlap.max_staleness = 2 drops nothing", []),
    "age of overlap": (["overlap.max_staleness=2", "overlap.staleness=2", "train.mini_batches=1"], "idle",
                       "overlap.max_staleness = 2 drops nothing",
                       ["overlap.max_staleness=2", "overlap.staleness=2", "train.mini_batches=2"]),
    "curriculum memory": (["curriculum.memory=0.5"], "idle", "curriculum.memory = 0.5: no effect", []),
    "replay size": (["replay.size=9"], "idle", "replay.size = 9: no effect", ["replay.size=9", "replay.groups=2"]),
    "replay age": (["replay.groups=2", "replay.max_age=1", "train.mini_batches=2"], "idle",
                   "replay.max_age = 1 allows no replay", ["replay.groups=2", "replay.max_age=2", "train.mini_batches=2"]),
    "punishment unseen": (
        ["length_penalty.name=soft", "objective.name=gtpo"], "idle",
        "length_penalty.name = 'soft' has no effect with gtpo", ["length_penalty.name=soft"],
    ),
    "punishment out of reach": (
        ["length_penalty.name=soft", "length_penalty.limit=60", "length_penalty.cache=12"], "idle",
        "length_penalty.limit = 60, cache = 12 never apply",
        ["length_penalty.name=soft", "length_penalty.limit=60", "length_penalty.cache=13"],
    ),
    "two answers": (["rollout.group_size=2"], "idle", "rollout.group_size = 2: every advantage is +-0.71",
                    ["rollout.group_size=2", "objective.name=dr_grpo"]),
    "adapter": (["adapter.alpha=16"], "idle", "adapter.alpha = 16: no effect", ["adapter.alpha=16", "adapter.rank=8"]),
    "offload": (["model.offload_activations=true"], "idle", "model.offload_activations = true: no effect",
                ["model.offload_activations=true", "model.gradient_checkpointing=true"]),
    "scoring": (["scoring.workers=3"], "idle", "scoring.workers = 3: no effect",
                ["scoring.workers=3", "reward.name=code_tests"]),
    "no rate": (["optimizer.learning_rate=0"], "risk", "optimizer.learning_rate = 0: no weight changes", []),
    "slow adapter": (["adapter.rank=8", "optimizer.learning_rate=1e-6"], "risk", "optimizer.learning_rate = 1e-06 hardly changes",
                     ["adapter.rank=8", "optimizer.learning_rate=1e-5"]),
    "warm-up": (["optimizer.warmup_steps=400"], "risk", "optimizer.warmup_steps = 400 is longer than the run",
                ["optimizer.warmup_steps=399"]),
    "cold": (["rollout.temperature=0.3"], "risk", "rollout.temperature = 0.3 makes the completions of a group equal",
             ["rollout.temperature=0.6"]),
    "greedy": (["rollout.top_k=1"], "risk", "rollout.top_k = 1 makes the completions of a group equal", []),
    "truncated": (["rollout.top_p=0.9"], "risk", "rollout.top_k, top_p or min_p truncate the distribution",
                  ["rollout.top_p=0.9", "rollout.mask_replay=true"]),
    "form": (
        ["reward.name=think_answer_form", "filter.dynamic_sampling=true"], "risk",
        "filter.dynamic_sampling = True needs correct completions", ["reward.name=think_answer_form"],
    ),
    "k1": (["objective.beta=0.1", "objective.kl=k1"], "risk", "objective.kl = 'k1' in the loss does not pull",
           ["objective.beta=0.1", "objective.kl=k3"]),
    "standardized penalty": (
        ["objective.beta=0.1", "objective.kl=k1", "objective.kl_in=reward"], "risk",
        "objective.beta = 0.1 is divided by the standard deviation", ["objective.name=rloo"],
    ),
    "cut groups": (["rollout.prompts_per_step=2", "train.mini_batches=4"], "risk",
                   "train.mini_batches = 4 splits groups: a mini-batch has 4 completions, a group 8",
                   ["rollout.prompts_per_step=4", "train.mini_batches=4"]),
    "tight clip": (["objective.clip_low=3e-4", "objective.clip_high=4e-4"], "risk",
                   "objective.clip_low = 0.0003, clip_high = 0.0004 clip token ratios",
                   [ONCE, "objective.clip_low=3e-4", "objective.clip_high=4e-4"]),
    "teacher without use": (["teacher.policy=frozen"], "idle", "teacher.policy = 'frozen' has no effect",
                            ["objective.name=sdpo", "teacher.policy=frozen"]),
    "teacher that knows nothing": (
        ["objective.name=sdpo", "teacher.policy=current", "teacher.context={success = '{text}'}", "rollout.group_size=1"],
        "risk", "teacher.context = success needs a second completion in each group",
        ["objective.name=sdpo", "teacher.policy=current", "rollout.group_size=1"],
    ),
    "teacher of half-known groups": (
        ["objective.name=sdpo", "teacher.policy=current", "teacher.context={success = '{text}'}"],
        "risk", "groups without a correct completion have no privileged text",
        ["objective.name=sdpo", "teacher.policy=current", "teacher.context={success = '{text}'}",
         "filter.dynamic_sampling=true"],
    ),
    "copy without staleness": (["engine.kind=process", "overlap.mode=copy"], "idle", "overlap.mode = 'copy' overlaps nothing",
                               ["engine.kind=process", "overlap.mode=copy", "overlap.staleness=1"]),
    "teacher that is the policy": (
        ["objective.name=sdpo", "teacher.policy=moving", "teacher.alpha=1.0"], "idle",
        "teacher.policy = 'moving' is the same as 'current' here", ["objective.name=sdpo", "teacher.policy=moving"],
    ),
    "critic without use": (["critic.learning_rate=1e-3"], "idle", "critic.learning_rate = 0.001 has no effect",
                           ["objective.name=ppo", "critic.learning_rate=1e-3"]),
    "critic without a rate": (["objective.name=ppo", "critic.learning_rate=0"], "risk", "critic.learning_rate = 0: the critic never changes",
                              ["objective.name=ppo"]),
    "critic that never ends": (["objective.name=ppo", "critic.warmup_steps=100"], "risk", "critic.warmup_steps = 100 takes all 100 steps",
                               ["objective.name=ppo", "critic.warmup_steps=99"]),
    "value clip": ([ONCE, "objective.name=ppo"], "idle", "objective.value_clip = 0.2 has no effect",
                   [ONCE, "objective.name=ppo", "objective.value_clip=0.0"]),
    "pairs and a reference that moves": (
        ["objective.name=dpo", "reference.kind=renewed"], "risk", "reference.kind = 'renewed' changes the reference of the pairs",
        ["objective.name=dpo"],
    ),
    "rounded rollouts": (["engine.dtype=float8"], "risk", "engine.dtype = 'float8' samples from a rounded policy", []),
    "few prompts": (["evaluate.prompts=119"], "risk", "119 held-out prompts cannot show a difference of 5%",
                    ["evaluate.prompts=120"]),
}  # fmt: skip


def config_of(*settings: str) -> Config:
    return resolve(load_config("arithmetic", ["model.device=cpu", *settings]))


def reported(*settings: str, facts: TaskFacts | None = None) -> list[Finding]:
    """Return findings except for equivalent algorithms."""
    return [f for f in findings(config_of(*settings), facts) if f.kind != "same"]


@pytest.mark.parametrize("case", CASES)
def test_settings_without_effect_and_harmful_settings_are_found(case: str) -> None:
    settings, kind, title, near = CASES[case]
    (finding,) = reported(*settings)
    assert (finding.kind, finding.title[: len(title)]) == (kind, title)
    assert reported(*near) == []


def test_every_rule_has_a_case() -> None:
    setups = [setup_of(config_of(*settings)) for settings, *_ in CASES.values()]
    setups.append(setup_of(config_of(), TaskFacts(solution_tokens=(999,))))
    setups.append(
        setup_of(config_of(), TaskFacts(context=99, prompt_tokens=(99,), longest_prompt=99))
    )
    constant = Baseline(success=0.375, answer="1", prompts=100)
    shortcut = TaskFacts(held_out=200, overlap=7, baselines=Baselines(constant=constant))
    setups.append(setup_of(config_of(), shortcut))
    drawn = config_of("curriculum.sampling=uncertain", "train.steps=2")
    setups.append(setup_of(drawn, TaskFacts(prompts=900)))
    silent = [rule.title for rule in RULES if not any(rule.findings(s) for s in setups)]
    assert silent == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_algorithm_has_a_finding_with_the_packaged_recipe(name: str) -> None:
    teacher = {"opd": ["teacher.path=embedded"], "sdpo": ["teacher.policy=frozen"]}.get(name, [])
    found = [finding.title for finding in reported(f"objective.name={name}", *teacher)]
    assert found == []


def test_the_defaults_have_no_finding() -> None:
    config = resolve(load_config("arithmetic"))
    assert findings(config, task_facts(config)) == []
    assert [f.kind for f in findings(resolve(Config()))] == ["same"]


def test_solutions_longer_than_max_tokens() -> None:
    config = config_of("rollout.max_tokens=24")
    facts = task_facts(config)
    assert (facts.held_out, len(facts.solution_tokens)) == (256, 64)
    assert max(facts.solution_tokens) <= 48  # they fit into the recipe's
    cut = sum(length > 24 for length in facts.solution_tokens)
    (finding,) = (f for f in findings(config, facts) if f.kind == "risk")
    assert (
        finding.title == f"rollout.max_tokens = 24 truncates the solutions of {cut} of 64 prompts"
    )
    assert reported("rollout.max_tokens=24") == []  # lengths are not known
    assert (
        reported("rollout.max_tokens=24", facts=TaskFacts(solution_tokens=(24, 24, 24, 25, 24)))
        == []
    )


def test_a_curriculum_needs_prompts_that_come_again() -> None:
    settings = ("curriculum.sampling=hard", "train.steps=10", "rollout.prompts_per_step=4")
    (finding,) = reported(*settings, facts=TaskFacts(prompts=41))
    assert finding.title.startswith("the curriculum draws 40 of 41 prompts")
    assert reported(*settings, facts=TaskFacts(prompts=40)) == []


def test_one_update_names_the_algorithms_that_coincide() -> None:
    (finding,) = findings(config_of(ONCE, "objective.name=gspo", "objective.beta=0.04"))
    assert finding.kind == "same"
    assert finding.title == (
        "with one optimizer step per training step gspo is the same as grpo, gspo_token, gmpo, gigpo, sapo"
    )
    assert findings(config_of(ONCE, "objective.name=dr_grpo")) == []


@pytest.mark.parametrize(
    ("prompts", "advice"),
    [(16, "train.mini_batches = 4"), (2, "train.mini_batches = 2"), (1, "train.epochs = 2")],
)
def test_the_updates_that_one_update_suggests_do_no_harm(prompts: int, advice: str) -> None:
    settings = (ONCE, f"rollout.prompts_per_step={prompts}")
    (finding,) = findings(config_of(*settings))
    assert finding.remedy.endswith(f"take several optimizer steps, such as {advice}")
    assert findings(config_of(*settings, advice.replace(" ", ""))) == []


def test_an_off_policy_limit_makes_arms_differ_if_engine_and_trainer_differ() -> None:
    limited = (ONCE, "objective.off_policy_limit=0.001")
    for dtype, alike in (("float32", 1), ("bfloat16", 0)):
        arms = {
            name: config_of(*settings, f"model.dtype={dtype}")
            for name, settings in (("a", (ONCE,)), ("b", limited))
        }
        assert len(coincidences(arms)) == alike


def test_a_finding_as_plain_data_and_in_one_line() -> None:
    (finding,) = reported("optimizer.learning_rate=0")
    assert list(finding.row()) == ["kind", "title", "why", "remedy", "docs"]
    assert all(isinstance(value, str) and value for value in finding.row().values())
    assert finding.line() == f"{finding.title}: {finding.remedy}"
    assert "\n" not in finding.line()


def test_a_finding_names_the_settings_it_depends_on() -> None:
    """Each is a key of the configuration, and those of the case are among them."""
    for settings, _, _, near in CASES.values():
        (finding,) = reported(*settings)
        config = config_of(*settings)
        for key in finding.settings:
            table, _, name = key.partition(".")
            section = getattr(config, table)
            assert name in {*type(section).model_fields, *getattr(section, "options", ())}, key
        changed = {setting.partition("=")[0] for setting in set(settings) ^ set(near)}
        if near:
            assert finding.depends_on(changed), (finding.settings, changed)
        assert not finding.depends_on(["save.every"])


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_documented_sections_exist() -> None:
    found = [f for settings, *_ in CASES.values() for f in findings(config_of(*settings))]
    found += findings(config_of("rollout.max_tokens=8"), TaskFacts(solution_tokens=(9,)))
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


def test_every_packaged_recipe_can_be_planned() -> None:
    for name in recipe_names():
        assert all(f.title and f.remedy for f in findings(resolve(load_config(name))))


def test_a_handful_of_held_out_prompts_is_not_more_than_all_of_them() -> None:
    (found,) = [f for f in reported("evaluate.prompts=4") if "held-out prompts cannot" in f.title]
    assert "with 4 prompts, no change can be" in found.why
    assert "%" not in found.why.partition("significant")[2]


def test_held_out_prompts_that_are_trained_on_and_shortcuts_are_findings() -> None:
    constant = Baseline(success=0.375, reward=0.4, answer="1", prompts=100)
    facts = TaskFacts(held_out=200, overlap=7, baselines=Baselines(constant=constant))
    titles = [finding.title for finding in reported(facts=facts)]
    assert "7 of 200 held-out prompts are training prompts too" in titles
    assert any("always answering '1' is correct on 37.5%" in title for title in titles)
