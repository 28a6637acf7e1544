"""Porting from TRL: no option of a script is lost, wherever the script sets it."""

from __future__ import annotations

import tomllib

import pytest

from covey.compat.trl import Ported, from_grpo_config, from_script
from covey.compat.trl_script import covey_script
from covey.config import parse_config

END = """
trainer = GRPOTrainer(model="embedded", args=cfg, train_dataset=rows, reward_funcs=reward)
trainer.train()
"""


def port(text: str, end: str = END) -> Ported:
    ported = from_script(text + end)
    parse_config(tomllib.loads(ported.toml()))
    return ported


def noted(ported: Ported, *parts: str) -> bool:
    return any(all(part in note for part in parts) for note in ported.notes)


@pytest.mark.parametrize(
    "kw", ['{"max_steps": 30, "num_generations": 4, "seed": f()}', "dict(max_steps=30, num_generations=4, seed=f())"]
)  # fmt: skip
def test_options_of_an_unpacked_dict_are_ported(kw: str) -> None:
    for text in (f"kw = {kw}\ncfg = GRPOConfig(beta=0.1, **kw)", f"cfg = GRPOConfig(**{kw})"):
        ported = port(text)
        assert ported.settings["train.steps"] == 30
        assert ported.settings["rollout.group_size"] == 4
        assert noted(ported, "seed: its value is computed")
        assert not noted(ported, "not known")


@pytest.mark.parametrize(
    "text",
    [
        "kw = read()\n",
        "kw = {'max_steps': 30}\nkw['max_steps'] = 5\n",
        "kw = {'max_steps': 30}\nkw.update(max_steps=5)\n",
        "kw = {'max_steps': 30}\nchange(kw)\n",
        "kw = {'max_steps': 30}\nother = kw\nother['max_steps'] = 5\n",
        "kw = {'max_steps': 30}\nkw = {}\n",
        "kw = {'max_steps': 30}\nfrom settings import *\n",
        "kw = {**base}\n",
    ],
)
def test_options_of_an_unknown_dict_are_named_once(text: str) -> None:
    ported = port(f"{text}cfg = GRPOConfig(**kw)")
    assert ported.notes.count("options in **kw are not known: add them yourself") == 1
    assert "train.steps" not in ported.settings
    assert "max_tokens = 512  # TRL's default, unless **kw sets it" in ported.toml()


def test_attributes_that_are_set_later_are_ported() -> None:
    ported = port(
        "cfg = GRPOConfig(max_steps=5, seed=1)\ncfg.max_steps = 30\nsetattr(cfg, 'seed', 2)"
    )
    assert (ported.settings["train.steps"], ported.settings["seed"]) == (30, 2)
    assert not noted(ported, "computed")
    ported = port("def main():\n    cfg = GRPOConfig(max_steps=5)\n    cfg.max_steps = 30", "")
    assert ported.settings["train.steps"] == 30


@pytest.mark.parametrize(
    "later",
    ["cfg.max_steps = f()", "if debug:\n    cfg.max_steps = 30", "cfg.max_steps += 1",
     f"{END}trainer.args.max_steps = 30", "setattr(cfg, 'max_steps', f())"],
)  # fmt: skip
def test_attributes_that_are_not_known_are_named(later: str) -> None:
    ported = port(f"cfg = GRPOConfig(max_steps=5)\n{later}", "" if "trainer" in later else END)
    assert noted(ported, "max_steps: its value is computed in the script")
    assert "train.steps" not in ported.settings
    lines = ported.toml().splitlines()
    mark = "  # max_steps is computed in the script; set it yourself"
    assert f"# steps = ...{mark}" in lines
    assert [line for line in lines if line.startswith("stop_after") and line.endswith(mark)]


def test_a_ported_script_does_not_use_a_removed_config() -> None:
    text = "cfg = GRPOConfig()\ncfg.max_steps = 5\nif debug:\n    cfg.seed = 1\n" + END
    written = covey_script(text, "own.toml")
    assert "# cfg.max_steps = 5  (TRL)" in written.splitlines()
    assert "    pass  # cfg.seed = 1  (TRL)" in written.splitlines()


def test_names_and_arithmetic_are_resolved() -> None:
    text = """
BS, OTHER = 4, 5
N = 4
LENGTH: int = 2 * 128 - N // 4
MODEL = "org/" + "model"
RATE = -(-2) * 10 ** -6
cfg = GRPOConfig(num_generations=N, max_completion_length=LENGTH, learning_rate=RATE)
trainer = GRPOTrainer(model=MODEL, args=cfg)
"""
    ported = port(text, "")
    found = ported.settings
    assert (found["rollout.group_size"], found["rollout.max_tokens"]) == (4, 255)
    assert found["optimizer.learning_rate"] == pytest.approx(2e-6)
    assert found["model.path"] == "org/model"
    assert not noted(ported, "computed")


@pytest.mark.parametrize(
    "text",
    ["N = f()", "N = 4\nN += 1", "N = 4\nfor N in (1, 2):\n    pass", "N = M\nM = N",
     "def main(N):\n    pass\nN = 4", "N = 4 / 0", "N = 9 ** 9 ** 9", "import x as N", "N = 'a' * 4"],
)  # fmt: skip
def test_a_value_that_is_not_known_is_named_at_its_setting(text: str) -> None:
    ported = port(f"{text}\ncfg = GRPOConfig(max_completion_length=N, learning_rate=N, use_vllm=N)")
    lines = ported.toml().splitlines()
    mark = "is computed in the script; set it yourself"
    assert f"max_tokens = 512  # max_completion_length {mark}" in lines
    assert f"# learning_rate = ...  # learning_rate {mark}" in lines
    assert f"# kind = ...  # use_vllm {mark}" in lines
    assert noted(ported, "max_completion_length: its value is computed")


def test_counts_of_steps_are_marked_if_the_updates_of_a_step_are_not_known() -> None:
    ported = port("cfg = GRPOConfig(max_steps=30, num_iterations=f())")
    mark = "  # num_iterations is computed in the script; set it yourself"
    lines = ported.toml().splitlines()
    assert {f"steps = 30{mark}", f"epochs = 1{mark}", f"every = 500{mark}"} <= set(lines)
    assert f"every = 0{mark}" not in lines  # no evaluation, whatever the value


def test_options_with_another_meaning_are_named() -> None:
    given = {"logging_steps": 1, "scale_rewards": "group", "loss_type": "bnpo"}
    ported = from_grpo_config({**given, "log_completions": True})
    assert noted(ported, "logging_steps = 1", "Covey logs every step")
    assert noted(ported, "loss_type = 'bnpo'", "micro-batch", "whole optimizer step")
    assert noted(ported, "log_completions = True", "rollouts/*.jsonl")
    assert not noted(ported, "scale_rewards")
    assert not noted(from_grpo_config({}), "logging_steps")
    assert "objective.name" in from_grpo_config({"scale_rewards": "group"}).given


def test_a_checkpoint_and_a_type_of_weights_are_named() -> None:
    text = "model = AutoModelForCausalLM.from_pretrained('m', torch_dtype=torch.float16)\n"
    start = f"{text}model.train(True)\ncfg = GRPOConfig()\n"
    ported = port(start)
    assert noted(ported, "from_pretrained: torch_dtype = torch.float16: set model.dtype")
    assert not noted(ported, "resume_from_checkpoint")
    assert noted(port(start, END.replace('"embedded"', "model")), "model = model: set model.path")
    for argument in ("resume_from_checkpoint='last'", "'last'"):
        ported = port(start, END.replace("train()", f"train({argument})"))
        assert noted(ported, "resume_from_checkpoint = 'last'", "resume=FOLDER")
