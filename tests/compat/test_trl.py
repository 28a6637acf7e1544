"""Porting from TRL: every option is translated, or named with what to do instead."""

from __future__ import annotations

import ast
import dataclasses
import runpy
import tomllib
from pathlib import Path

import pytest

from covey.cli.main import run
from covey.compat.trl import from_grpo_config, from_script
from covey.compat.trl_options import DEFAULTS, DIRECT, HANDLED, NAMED, OLDER, VERSION
from covey.config import Config, parse_config
from covey.errors import ConfigError
from covey.records.folder import RunFolder
from covey.training.resolve import resolve

CALLS = [
    'output_dir="Qwen2-0.5B-GRPO", logging_steps=10',
    'output_dir="out", use_vllm=True, vllm_mode="colocate", bf16=True',
    'output_dir="out", use_vllm=True, vllm_server_base_url="http://localhost:8000", vllm_server_timeout=120.0',
    'output_dir="out", num_generations=4, max_completion_length=256, per_device_train_batch_size=4, gradient_accumulation_steps=2',
    'output_dir="out", beta=0.04, loss_type="grpo", epsilon=0.1, epsilon_high=0.3, num_iterations=2',
    'output_dir="out", loss_type="dr_grpo", scale_rewards=False, max_completion_length=1024',
    'output_dir="out", importance_sampling_level="sequence", loss_type="grpo", beta=0.0, epsilon=3e-4, epsilon_high=4e-4, gradient_accumulation_steps=1, steps_per_generation=4',
    'output_dir="out", loss_type="dapo", epsilon_high=0.28, mask_truncated_completions=True, num_generations=16',
    'output_dir="out", loss_type="cispo", epsilon_high=5.0, learning_rate=2e-6',
    'output_dir="out", loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05',
    'output_dir="out", sync_ref_model=True, ref_model_mixup_alpha=0.6, ref_model_sync_steps=512, beta=0.01',
    'output_dir="out", top_entropy_quantile=0.2, use_liger_kernel=True',
    'output_dir="out", learning_rate=1e-5, lr_scheduler_type="cosine", warmup_steps=10, weight_decay=0.1, adam_beta2=0.99, max_grad_norm=0.1',
    'output_dir="out", max_steps=250, save_steps=250, save_total_limit=2, report_to="none", seed=0',
    'output_dir="out", eval_strategy="steps", eval_steps=50, num_generations_eval=4, load_best_model_at_end=True, metric_for_best_model="reward"',
    'output_dir="out", temperature=0.9, top_p=0.95, top_k=50, min_p=0.05, repetition_penalty=1.1',
    'output_dir="out", gradient_checkpointing=False, bf16=True, deepspeed="ds.json", push_to_hub=True, report_to=["wandb", "tensorboard"]',
    'output_dir="out", chat_template_kwargs={"enable_thinking": False}, max_tool_calling_iterations=5, log_completions=True',
    'output_dir="out", delta=4.0, loss_type="grpo", reward_weights=[1.0, 0.5], scale_rewards="batch", torch_compile=True',
    'output_dir="out", generation_batch_size=64, num_generations=8, per_device_train_batch_size=8, learning_rate=rate, num_train_epochs=1',
]
"""Options of GRPOConfig as in the examples of TRL's documentation."""

PASSED = {"task", "reward"}
SCRIPT = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
rate = 1e-6 * len(dataset)

def reward_num_unique_chars(completions, **kwargs):
    return [len(set(c)) for c in completions]

training_args = GRPOConfig({options})
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=reward_num_unique_chars,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
"""


def config_of(options: str) -> Config:
    ported = from_script(SCRIPT.replace("{options}", options))
    return resolve(parse_config(tomllib.loads(ported.toml())), passed=PASSED)


@pytest.mark.parametrize("options", CALLS)
def test_each_option_of_a_script_is_translated_or_named(options: str) -> None:
    ported = from_script(SCRIPT.replace("{options}", options))
    config = parse_config(tomllib.loads(ported.toml()))
    resolve(config.model_copy(update={"trackers": []}), passed=PASSED)  # may not be installed
    assert config.model.path == "Qwen/Qwen2-0.5B-Instruct"
    text = "\n".join(ported.notes)
    for name in (part.partition("=")[0].strip() for part in split(options)):
        assert name in DIRECT or name in HANDLED or f"{name} = " in text or f"{name}: " in text
    assert "reward_funcs = reward_num_unique_chars: pass it as rewards" in text
    assert "not an option" not in text


def split(options: str) -> list[str]:
    """Return the keywords of a call."""
    (call,) = ast.parse(f"f({options})").body
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    return [f"{keyword.arg}=" for keyword in call.value.keywords]


def test_batches_steps_and_lengths_mean_the_same_on_one_device() -> None:
    # 4 completions x 2 accumulations: 8 completions are 2 prompts of 4, one optimizer step.
    config = config_of(CALLS[3])
    rollout, train = config.rollout, config.train
    assert (rollout.prompts_per_step, rollout.group_size, rollout.max_tokens) == (2, 4, 256)
    assert (train.mini_batches, train.epochs, train.stop_after.epochs) == (1, 1, 3.0)
    # Four generation steps of 8 completions and no accumulation: four optimizer steps per batch.
    config = config_of(CALLS[6])
    assert (config.rollout.prompts_per_step, config.train.mini_batches) == (4, 4)
    assert config.objective.name == "gspo"
    assert config.objective.options["clip_high"] == 4e-4
    # max_steps counts optimizer steps, two of which a batch with num_iterations = 2 takes.
    config = config_of("max_steps=250, num_iterations=2")
    assert (config.train.steps, config.train.epochs) == (125, 2)


def test_counts_of_optimizer_steps_become_training_steps() -> None:
    # Two optimizer steps in a training step; warm-up counts optimizer steps in both.
    options = "num_iterations=2, max_steps=20, save_steps=10, warmup_steps=4, "
    config = config_of(options + "eval_strategy='steps', eval_steps=6")
    assert (config.train.steps, config.save.every, config.evaluate.every) == (10, 5, 3)
    assert config.optimizer.warmup_steps == 4
    given = {"num_iterations": 2, "max_steps": 20, "save_steps": 5, "warmup_steps": 0.1}
    odd = from_grpo_config({**given, "eval_strategy": "steps", "eval_steps": 0.2})
    assert odd.settings["save.every"] == 3
    assert any("save_steps = 5" in note and "save.every = 3 is 6" in note for note in odd.notes)
    assert (odd.settings["evaluate.every"], odd.settings["optimizer.warmup_ratio"]) == (2, 0.1)
    # Without eval_steps, TRL evaluates every logging_steps optimizer steps, ten by default.
    assert from_grpo_config({"eval_strategy": "steps"}).settings["evaluate.every"] == 10


LORA = """
from peft import LoraConfig
peft_config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules={targets}, bias="all")
"""


def test_a_lora_config_becomes_the_adapter() -> None:
    script = SCRIPT.replace("{options}", "").replace(
        "args=training_args", "args=training_args, peft_config=peft_config"
    )
    ported = from_script(LORA.replace("{targets}", '["v_proj", "q_proj"]') + script)
    adapter = parse_config(tomllib.loads(ported.toml())).adapter
    assert (adapter.rank, adapter.alpha, adapter.dropout) == (8, 16, 0.05)
    assert adapter.targets == ["q_proj", "v_proj"]
    assert any("bias = 'all'" in note for note in ported.notes)
    assert not any(note.startswith("peft_config") for note in ported.notes)
    ported = from_script(LORA.replace("{targets}", '"all-linear"') + script)
    assert ported.settings["adapter.targets"] == ["all-linear"]
    ported = from_script(LORA.replace("{targets}", "names()") + script)
    assert any("target_modules is computed" in note for note in ported.notes)


def test_the_file_tells_the_scripts_settings_from_trls_defaults() -> None:
    ported = from_grpo_config({"beta": 0.0, "max_prompt_length": 128})
    lines = ported.toml().splitlines()
    assert f"defaults of TRL {VERSION}" in lines[0]
    assert "beta = 0.0" in lines  # the script's, though it is also the default
    assert "max_prompt_tokens = 128" in lines
    assert "max_tokens = 512  # TRL's default" in lines
    assert any(f"max_prompt_length = 128: an option of TRL before {VERSION}" in n for n in lines)


def test_a_ported_file_is_never_a_run_on_other_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ported.toml"
    file.write_text(from_grpo_config({"max_steps": 1}).toml())
    for command in (["train", str(file), "--model", "embedded"], ["plan", str(file)]):
        assert run(command) == 2
        error = capsys.readouterr().err
        assert "covey.train(" in error
        assert "dataset=" in error or "rewards=" in error


OWN_SCRIPT = """# my experiment
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig

ROWS = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "level": i} for i in range(1, 9)]

def by_level(level, **kwargs):  # a comment of my own
    return [float(n) for n in level]

def length(completion_ids, trainer_state, **kwargs):
    return [len(ids) + 100.0 * trainer_state.global_step for ids in completion_ids]

def main():
    args = GRPOConfig(
        output_dir="out", max_steps=4, num_iterations=2, per_device_train_batch_size=8,
        num_generations=4, max_completion_length=3, reward_weights=[0.0, 1.0], use_cpu=True,
    )
    trainer = GRPOTrainer(
        model="embedded", args=args, train_dataset=ROWS, reward_funcs=[by_level, length],
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model("saved")
    return result

if __name__ == "__main__":
    done = main()
"""


def test_the_ported_script_trains_on_its_own_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trl_script.py").write_text(OWN_SCRIPT)
    command = ["port", "trl", "trl_script.py", "--script", "own.py"]
    assert run(command) == 2  # the script needs the file of settings
    assert run([*command, "--out", "own.toml"]) == 0
    text = Path("own.py").read_text()
    assert "a comment of my own" in text
    assert "# trainer.save_model(" in text
    assert not {"GRPOTrainer", "LoraConfig", "GRPOConfig"} & {
        node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)
    }
    done = runpy.run_path("own.py", run_name="__main__")["done"]
    rows = [row for step in (1, 2) for row in RunFolder(done.folder).rollouts(step)]
    assert len(rows) == 16
    for index, row in enumerate(rows):  # two optimizer steps lie before the second step
        assert row["reward"] == len(row["tokens"]) + 200.0 * (index >= 8)
        assert row["parts"]["by_level"] == row["info"]["level"]
    assert run([*command, "--out", "own.toml"]) == 2  # a file is never overwritten


def test_trls_defaults_are_kept_where_ours_differ() -> None:
    config = config_of("output_dir='out'")
    assert (config.objective.name, config.objective.options["clip_high"]) == ("dapo", 0.2)
    assert (config.objective.options["beta"], config.seed) == (0.0, 42)
    assert (config.rollout.max_tokens, config.optimizer.schedule) == (512, "linear")
    assert config_of("beta=0.04, loss_type='grpo'").objective.options["kl"] == "ratio_k3"


def test_values_without_a_counterpart_are_named() -> None:
    notes = from_grpo_config({"lr_scheduler_type": "polynomial", "report_to": ["mlflow"]}).notes
    assert "lr_scheduler_type = 'polynomial': optimizer.schedule has no such value" in notes
    assert any("report_to = 'mlflow'" in note for note in notes)


def test_every_option_of_the_installed_trl_is_known() -> None:
    trl = pytest.importorskip("trl")
    found = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    assert sorted(set(found) - set(DIRECT) - set(HANDLED) - set(NAMED)) == []
    assert trl.__version__.startswith(f"{VERSION}.")
    assert not found.keys() & set(OLDER)
    for name, value in DEFAULTS.items():
        assert found[name] == value, name
    made = trl.GRPOConfig(output_dir="out", use_cpu=True, bf16=False, num_generations=4)
    assert from_grpo_config(made).settings["rollout.group_size"] == 4
    made = trl.GRPOConfig(output_dir="out", use_cpu=True, bf16=False, lr_scheduler_type="cosine")
    ported = from_grpo_config(made)  # TRL makes an enum of the schedule
    assert ported.settings["optimizer.schedule"] == "cosine"
    assert not any("lr_scheduler_type" in note for note in ported.notes)


def test_the_command_prints_or_writes_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "train.py", tmp_path / "mine.toml"
    script.write_text(SCRIPT.replace("{options}", CALLS[19]))
    assert run(["port", "trl", str(script)]) == 0
    shown = capsys.readouterr().out
    assert "# learning_rate: its value is computed in the script; set it yourself" in shown
    assert tomllib.loads(shown)["rollout"]["prompts_per_step"] == 8
    assert run(["port", "trl", str(script), "--out", str(out)]) == 0
    assert out.read_text() == shown.rstrip("\n") + "\n"
    script.write_text("print(1)")
    assert run(["port", "trl", str(script)]) == 2
    with pytest.raises(ConfigError, match="is not valid Python: line 1"):
        from_script("def")
