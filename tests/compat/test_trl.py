"""Porting from TRL: the script runs with recorders, and what a port writes runs."""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import run
from covey.compat.trl import from_grpo_config, ported
from covey.compat.trl_options import (
    DEFAULTS,
    DIRECT,
    HANDLED,
    HARMLESS,
    NAMED,
    OLDER,
    PIECES,
    RENAMED,
    STOPS,
    VERSION,
)
from covey.config import Config, parse_config
from covey.config.resolve import resolve
from covey.errors import ConfigError
from covey.records.folder import RunFolder

PASSED = {"task", "reward"}


def config_of(**options: Any) -> Config:
    text = from_grpo_config({"max_steps": 10, **options}).toml()
    return resolve(parse_config(tomllib.loads(text)), passed=PASSED)


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Return a function that writes a script, ports it, and returns what `covey port` says."""
    monkeypatch.chdir(tmp_path)

    for module in ("own", "own_trl", "own_rewards"):  # of an earlier test
        monkeypatch.delitem(sys.modules, module, raising=False)

    def ported_script(text: str, *arguments: str, name: str = "own.py", code: int = 0) -> str:
        Path(name).write_text(text)
        stem = Path(name).stem
        assert run(["port", "trl", name, "--trust", stem, "--", *arguments]) == code
        out, err = capfd.readouterr()
        return err if code else out

    return ported_script


def settings(file: str = "own.toml") -> dict[str, Any]:
    return tomllib.loads(Path(file).read_text())


ARGPARSE = """
import argparse
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-5)
args = parser.parse_args()
ROWS = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "level": i} for i in range(1, 9)]

def by_level(level, **kwargs):
    return [float(n) for n in level]

def length(completion_ids, trainer_state, **kwargs):
    return [len(ids) + 100.0 * trainer_state.global_step for ids in completion_ids]

config = GRPOConfig(
    output_dir="out", learning_rate=args.lr, per_device_train_batch_size=8, num_generations=4,
    max_completion_length=3, max_steps=2 * 2, reward_weights=[0.0, 1.0], bf16=True,
)
config.num_iterations = 2
trainer = GRPOTrainer(
    model="embedded", args=config, train_dataset=ROWS, reward_funcs=[by_level, length],
    peft_config=LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"),
)
trainer.train()
trainer.save_model("saved")
"""


def test_values_of_the_command_line_are_ported_and_the_result_trains(port: Any) -> None:
    assert "--trust own_trl" in port(ARGPARSE, "--lr", "3e-4")
    found = settings()
    assert found["optimizer"]["learning_rate"] == 3e-4
    assert found["train"] == {"epochs": 2, "mini_batches": 1, "steps": 2}
    assert (found["adapter"]["rank"], found["adapter"]["alpha"]) == (4, 16)
    assert found["reward"]["weights"] == [0.0, 1.0]
    trusted = ["own.toml", "--trust", "own_trl"]
    assert run(["plan", *trusted]) == 0
    cpu = ["--set", "model.device=cpu", "--set", "model.dtype=float32", "--run", "run"]
    assert run(["train", *trusted, *cpu]) == 0
    rows = RunFolder(Path("run")).steps()
    # The second step begins after two optimizer steps; the first function has the weight 0.
    rewards = [row["objective/scores"] for row in rows]
    assert 0 < rewards[0] <= 3
    assert 200 < rewards[1] <= 203
    assert rows[0]["objective/parts/by_level"] >= 1


def test_a_script_runs_only_if_it_is_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "own.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert run(["port", "trl", str(script)]) == 2
    assert "--trust own" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


STYLED = """
from dataclasses import dataclass, field
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import think_format_reward

@dataclass
class Own(ScriptArguments):
    bonus: float = field(default=0.5)

if __name__ == "__main__":
    parser = TrlParser((Own, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    data = Dataset.from_list([{"sum": f"{i}+{i}=", "solution": str(2 * i)} for i in range(12)])
    data = data.map(lambda row: {"prompt": [{"role": "user", "content": row["sum"]}]})
    split = data.train_test_split(test_size=4, seed=1)

    def accuracy(completions, solution, **kwargs):
        return [script_args.bonus + (c[0]["content"] == s) for c, s in zip(completions, solution)]

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path, args=training_args,
        reward_funcs=[think_format_reward, accuracy], train_dataset=split["train"],
        eval_dataset=split["test"] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
"""
FLAGS = [
    "--model_name_or_path",
    "embedded",
    "--output_dir",
    "o",
    "--learning_rate",
    "1e-5",
    "--bonus",
    "0.75",
    "--eval_strategy",
    "steps",
    "--eval_steps",
    "2",
    "--max_completion_length",
    "8",
    "--max_steps",
    "2",
    "--beta",
    "0.01",
    "--num_generations",
    "2",
    "--per_device_train_batch_size",
    "4",
    "--use_peft",
    "--lora_r",
    "4",
    "--lora_target_modules",
    "q_proj",
    "v_proj",
    "--push_to_hub",
    "--loss_type",
    "sapo",
    "--scale_rewards",
    "none",
]


def test_trls_own_style_is_ported_with_functions_inside_functions(port: Any) -> None:
    said = port(STYLED, *FLAGS)
    assert "push_to_hub = True" in said
    found = settings()
    assert found["adapter"]["targets"] == ["q_proj", "v_proj"]
    assert found["reward"]["functions"] == ["own_trl:think_format_reward", "own_trl:accuracy"]
    pieces = ("advantage", "surrogate", "ratio", "weights")
    assert [found["objective"][key] for key in pieces] == [
        "centered", "soft_gate", "token", "sequence_mean_token_mean"
    ]  # fmt: skip
    assert len(Path("own.jsonl").read_text().splitlines()) == 8
    assert len(Path("own-held-out.jsonl").read_text().splitlines()) == 4
    words = ["own.toml", "--trust", "own_trl", "--set", "model.device=cpu", "--run", "run"]
    assert run(["train", *words]) == 0
    (row, _) = RunFolder(Path("run")).steps()
    assert row["objective/parts/accuracy"] == 0.75  # the --bonus of the script's run
    assert len(RunFolder(Path("run")).evaluations()) == 2


LOOP = """
from transformers import AutoModelForCausalLM
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

def short(completions, **kwargs):
    return [-float(len(c)) for c in completions]

def main():
    data = load_dataset("nobody/no-such-data", split="train")
    for beta in (0.0, 0.125):
        model = AutoModelForCausalLM.from_pretrained("nobody/no-such-model")
        model.resize_token_embeddings(100)
        args = GRPOConfig("out", beta=beta, learning_rate=2 ** -20)
        result = GRPOTrainer(model, short, args, data).train()
        print(f"loss {result.training_loss:.3f}")

if __name__ == "__main__":
    main()
"""


def test_each_training_of_a_loop_is_ported_and_nothing_is_loaded(port: Any) -> None:
    said = port(LOOP)
    assert "model.resize_token_embeddings(...)" in said
    files = [settings(f"own-{number}.toml") for number in (1, 2)]
    assert [f["objective"]["beta"] for f in files] == [0.0, 0.125]
    assert files[0]["optimizer"]["learning_rate"] == 2**-20
    assert files[0]["model"]["path"] == "nobody/no-such-model"
    assert files[0]["task"]["path"] == "nobody/no-such-data"
    assert files[0]["reward"]["functions"] == ["own:short"]  # importing the script trains nothing


def test_a_dataset_whose_rows_a_script_needs_is_named_if_it_cannot_be_loaded(port: Any) -> None:
    text = LOOP.replace('split="train")', 'split="train").map(lambda row: row)')
    assert "nobody/no-such-data" in port(text, code=2)


YAML = """
model_name_or_path: embedded
dataset_name: nobody/no-such-data
learning_rate: 1.0e-5
kl_coef: 0.02
max_steps: 3
reward_funcs: [think_format_reward, own_rewards.short]
"""


def test_a_file_for_trl_grpo_is_ported_with_old_names(port: Any, tmp_path: Path) -> None:
    (tmp_path / "own_rewards.py").write_text("def short(completions, **k):\n    return [1.0]\n")
    port(YAML, name="own.yaml")
    found = settings()
    assert found["objective"]["beta"] == 0.02
    functions = ["trl.rewards.format_rewards:think_format_reward", "own_rewards:short"]
    assert found["reward"]["functions"] == functions
    assert "kl_coefff" in port(YAML.replace("kl_coef", "kl_coefff"), name="own.yaml", code=2)


TOOLS = """
from trl import GRPOConfig, GRPOTrainer

def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: One.
        b: Another.
    '''
    return a + b

def calls(completions, **kwargs):
    return [float(len(messages)) for messages in completions]

if __name__ == "__main__":
    GRPOTrainer(
        model="embedded", reward_funcs=calls, tools=[add],
        args=GRPOConfig("out", max_completion_length=8, max_steps=1, optim="sgd"),
        train_dataset=[{"prompt": [{"role": "user", "content": f"{i}+1="}]} for i in range(8)],
    ).train()
"""


def test_tools_become_an_environment_and_what_covey_lacks_stops_by_name(port: Any) -> None:
    assert "optim = 'sgd'" in port(TOOLS, code=2)
    port(TOOLS.replace(', optim="sgd"', ""))
    environment = settings()["environment"]
    assert (environment["name"], environment["functions"]) == ("tools", ["own:add"])
    assert run(["plan", "own.toml", "--trust", "own"]) == 0


ENVIRONMENT = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

class Game:
    def reset(self, **row):
        self.score = row["level"]

    def move(self, direction: str) -> str:
        '''Move.

        Args:
            direction: Where to.
        '''
        self.score += 1
        return str(self.score)

def score(environments, **kwargs):
    return [environment.score for environment in environments]

def words(completions, **kwargs):
    return [len(messages) + 0.5 for messages in completions]

def main():
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "level": i} for i in range(1, 9)]
    GRPOTrainer(
        model="embedded", train_dataset=Dataset.from_list(rows), reward_funcs=[score, words],
        args=GRPOConfig("out", max_completion_length=64, max_steps=1, reward_weights=[1.0, 100.0]),
        environment_factory=Game,
    ).train()

if __name__ == "__main__":
    main()
"""


def test_reward_functions_get_the_environment_of_the_episode(port: Any) -> None:
    port(ENVIRONMENT)
    words = ["own.toml", "--trust", "own", "--set", "model.device=cpu", "--run", "run"]
    assert run(["plan", *words[:3]]) == 0
    assert run(["train", *words]) == 0
    (row,) = (Path("run") / "rollouts/000001.jsonl").read_text().splitlines()[:1]
    found = json.loads(row)
    assert found["parts"]["score"] == float(found["prompt"].partition("+")[0])
    assert found["parts"]["words"] in (50.0, 150.0)  # a message that was cut off does not count
    assert found["reward"] == sum(found["parts"].values())


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ('args=GRPOConfig("out"', 'args=GRPOConfig("out", gradient_mood=1', "gradient_mood"),
        ("tools=[add]", "rollout_func=print", "rollout_func"),
        ('reward_funcs=calls', 'reward_funcs="nobody/reward-model"', "reward_funcs"),
        ('"content": f"{i}+1="}]}', '"content": f"{i}+1="}], "image": None}', "image"),
        ("from trl", "import no_such_package\nfrom trl", "no_such_package"),
        (").train()", ")", "GRPOTrainer"),
        ("def calls(", "def calls(environments, ", "environments"),
        ("if __name__", "class GRPOTrainer(GRPOTrainer):\n    def compute_loss(self): ...\n\nif __name__", "compute_loss"),
    ],
)  # fmt: skip
def test_each_thing_that_covey_lacks_is_named(port: Any, old: str, new: str, name: str) -> None:
    text = TOOLS.replace(', optim="sgd"', "")
    assert old in text
    assert name in port(text.replace(old, new), code=2)


def test_batches_steps_and_lengths_mean_the_same_on_one_device() -> None:
    # 4 completions x 2 accumulations: 8 completions are 2 prompts of 4, one optimizer step.
    config = config_of(
        num_generations=4, max_completion_length=256, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, max_steps=-1,
    )  # fmt: skip
    rollout, train = config.rollout, config.train
    assert (rollout.prompts_per_step, rollout.group_size, rollout.max_tokens) == (2, 4, 256)
    assert (train.mini_batches, train.epochs, train.stop_after.epochs) == (1, 1, 3.0)
    # Four generation steps of 8 completions and no accumulation: four optimizer steps per batch.
    config = config_of(
        importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4,
        steps_per_generation=4,
    )  # fmt: skip
    assert (config.rollout.prompts_per_step, config.train.mini_batches) == (4, 4)
    assert config.objective.name == "gspo"
    assert config.objective.options["clip_high"] == 4e-4
    # max_steps counts optimizer steps, two of which a batch with num_iterations = 2 takes.
    config = config_of(max_steps=250, num_iterations=2)
    assert (config.train.steps, config.train.epochs) == (125, 2)


def test_counts_of_optimizer_steps_become_training_steps() -> None:
    # Two optimizer steps in a training step; warm-up counts optimizer steps in both.
    given: dict[str, Any] = {"num_iterations": 2, "max_steps": 20, "warmup_steps": 4}
    config = config_of(**given, save_steps=10, eval_strategy="steps", eval_steps=6)
    assert (config.train.steps, config.save.every, config.evaluate.every) == (10, 5, 3)
    assert config.optimizer.warmup_steps == 4
    given = {"num_iterations": 2, "max_steps": 20, "save_steps": 5, "warmup_steps": 0.1}
    odd = from_grpo_config({**given, "eval_strategy": "steps", "eval_steps": 0.2})
    assert odd.settings["save.every"] == 3
    assert any("save_steps = 5" in note and "save.every = 3 is 6" in note for note in odd.notes)
    assert (odd.settings["evaluate.every"], odd.settings["optimizer.warmup_ratio"]) == (2, 0.1)
    # Without eval_steps, TRL evaluates every logging_steps optimizer steps, ten by default.
    assert from_grpo_config({"eval_strategy": "steps"}).settings["evaluate.every"] == 10


def test_the_file_tells_the_scripts_settings_from_trls_defaults() -> None:
    lines = from_grpo_config({"beta": 0.0, "max_prompt_length": 128}).toml().splitlines()
    assert f"defaults of TRL {VERSION}" in lines[0]
    assert "beta = 0.0" in lines  # the script's, though it is also the default
    assert "max_prompt_tokens = 128" in lines
    assert "max_tokens = 512  # TRL's default" in lines


@pytest.mark.parametrize("loss", PIECES)
@pytest.mark.parametrize("scale", ["group", "none", "batch"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_every_loss_with_every_scale_is_an_objective(loss: str, scale: str, level: str) -> None:
    config = config_of(loss_type=loss, scale_rewards=scale, importance_sampling_level=level)
    assert config.objective.name != "composed" or config.objective.options["advantage"]


def test_a_ported_configuration_without_data_names_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ported.toml"
    file.write_text(from_grpo_config({"max_steps": 1}).toml())
    assert run(["plan", str(file), "--set", "task.name=arithmetic"]) == 2
    error = capsys.readouterr().err
    assert "reward.functions" in error
    assert "covey.train(" in error


def test_every_option_of_trl_is_known_with_its_default() -> None:
    from trl import GRPOConfig

    options = {option.name: option for option in dataclasses.fields(GRPOConfig) if option.init}
    known = DIRECT.keys() | HANDLED.keys() | NAMED.keys() | STOPS.keys()
    assert options.keys() - known == set()
    assert known - options.keys() <= set(OLDER)
    assert HARMLESS.keys() <= STOPS.keys()
    assert set(RENAMED.values()) <= known
    assert RENAMED.keys().isdisjoint(options)
    assert {name: options[name].default for name in DEFAULTS} == dict(DEFAULTS)


def test_a_config_object_of_trl_is_converted() -> None:
    from trl import GRPOConfig

    config = GRPOConfig("out", use_cpu=True, bf16=False, learning_rate=3e-6, num_generations=4)
    found = from_grpo_config(config)
    assert found.settings["optimizer.learning_rate"] == 3e-6
    assert found.settings["rollout.prompts_per_step"] == 2
    assert "model.dtype" not in found.settings


@pytest.mark.parametrize("name", STOPS)
def test_an_option_that_changes_the_training_and_is_missing_stops(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ported({name: {"a": 1}})
    for value in HARMLESS.get(name, ()):
        ported({name: value})
