"""A name in a configuration runs nothing until its module is trusted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from covey.cli.main import run
from covey.config import load_config
from covey.errors import ConfigError
from covey.rewards.registry import make_reward
from covey.tasks.registry import make_task
from covey.trust import import_callable, is_trusted, scoped_trust, trust

TRAP = """
open("imported", "w").close()
from subprocess import run
from functools import lru_cache, partial, wraps
import os

def task(): return 7
def fails(): raise RuntimeError("first\\nsecond")
def reward(prompt, text, *, scale=1.0): return scale
def one(prompt): return 1.0
cached = lru_cache(reward)
double = partial(reward, scale=2.0)
system = os.system
shell = partial(os.system, "true")
class Judge:
    def __call__(self, prompt, text): return 0.5
judge = Judge()
class Objective: pass
"""


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder whose module `trap` leaves a file when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COVEY_TRUST", "")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "trap", raising=False)
    (tmp_path / "trap.py").write_text(TRAP)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/environment.json").write_text("{}")
    (tmp_path / "run/config.toml").write_text('[reward]\nname = "trap:reward"\n')
    (tmp_path / "rows.jsonl").write_text('{"completion": "1", "answer": "1"}\n')
    yield tmp_path
    sys.modules.pop("trap", None)


CONFIG = "run/config.toml"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", CONFIG],
        ["train", CONFIG],
        ["train", "--resume", "run"],
        ["sft", CONFIG],
        ["eval", "embedded", "--config", CONFIG],
        ["numerics", "run"],
        ["compare", CONFIG, "--algorithms", "grpo,dapo", "--dry-run"],
        ["rewards", "score", "rows.jsonl", "--config", CONFIG],
        ["rewards", "lab", CONFIG],
        ["rewards", "list", "trap:reward"],
        ["algorithms", "trap:reward"],
        ["plan", "--set", "objective.name=trap:reward"],
        ["plan", "--set", "task.name=trap:task"],
        ["rewards", "score", "rows.jsonl", "--set", "reward.name=mix",
         "--set", "reward.parts={a = {name = 'trap:reward', weight = 1}}"],
        ["train", "--set", "task.name=mixed", "--set", "task.parts={a = {name = 'trap:task'}}"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_no_command_imports_what_is_not_trusted(
    arguments: list[str], trap: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    error = capfd.readouterr().err
    assert error.startswith("covey: config: ")
    assert "'trap:" in error
    assert "--trust trap" in error
    assert error.count("\n") == 1
    assert not (trap / "imported").exists()


@pytest.mark.parametrize("more", [[], ["--trust", "trap"]])
def test_printing_a_config_imports_nothing(
    more: list[str], trap: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    named = [f"{section}.name=trap:reward" for section in ("task", "reward", "objective")]
    settings = [word for name in [*named, "reward.scale=3"] for word in ("--set", name)]
    assert run(["train", "--print-config", *settings, *more]) == 0
    Path("again.toml").write_text(capfd.readouterr().out)
    assert not (trap / "imported").exists()
    assert load_config("again.toml").reward.options == {"scale": 3}


def test_trust_is_given_by_a_flag_that_ends_with_the_command(
    trap: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    score = ["rewards", "score", "rows.jsonl", "--config", CONFIG]
    assert run([*score, "--trust", "trap"]) == 0
    assert "mean reward 1.0000" in capfd.readouterr().out
    assert not is_trusted("trap")
    assert run(score) == 2


def test_trust_is_given_by_the_environment_and_reaches_other_processes() -> None:
    code = "from covey.trust import is_trusted as t; print(t('a'), t('b.c'), t('bc'), t('b'))"
    with scoped_trust():
        trust(["a,b.c"])
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert done.stdout == b"True True False False\n"
    assert not is_trusted("a")


@pytest.mark.parametrize(
    ("modules", "name", "trusted"),
    [
        ("a", "a", True),
        ("a", "a.b", True),
        ("a", "ab", False),
        ("a.b", "a", False),
        (" a , b ", "b", True),
        ("", "", False),
        (",", "", False),
        ("1", "os", False),
        ("*", "os", False),
    ],
)
def test_a_package_stands_for_what_is_in_it(
    modules: str, name: str, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COVEY_TRUST", modules)
    assert is_trusted(name) == trusted


@pytest.mark.parametrize("name", ["reward", "cached", "double", "judge", "Judge"])
def test_code_of_a_trusted_module_is_taken(name: str, trap: Path) -> None:
    os.environ["COVEY_TRUST"] = "trap"
    assert callable(make_reward(f"trap:{name}", {}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "run",
            "reward.name = 'trap:run' would run code of the module 'subprocess', which is not tr",
        ),
        (
            "wraps",
            "reward.name = 'trap:wraps' would run code of the module 'functools', which is not",
        ),
        ("system", "reward.name = 'trap:system' is not a Python function or class"),
        ("shell", "reward.name = 'trap:shell' is not a Python function or class"),
        (
            "one",
            "reward: one is not a reward function (",
        ),
        ("os.system", "reward.name = 'trap:os.system' must have the form 'module:function'"),
    ],
)
def test_what_is_no_reward_is_refused_before_it_is_called(
    name: str, message: str, trap: Path
) -> None:
    os.environ["COVEY_TRUST"] = "trap"
    with pytest.raises(ConfigError) as raised:
        make_reward(f"trap:{name}", {})
    assert str(raised.value).removeprefix("config: ").startswith(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("task", "returned int, which is not a task; a task has a name, train() and held_out()"),
        ("fails", "raised an error: RuntimeError: first second (trap.py, line 8)"),
    ],
)
def test_a_task_of_ones_own_must_be_one(name: str, message: str, trap: Path) -> None:
    os.environ["COVEY_TRUST"] = "trap"
    with pytest.raises(ConfigError) as raised:
        make_task(f"trap:{name}", {})
    assert (
        str(raised.value).replace(f"{Path.cwd()}/", "")
        == f"config: task.name = 'trap:{name}' {message}"
    )


def test_an_untrusted_name_is_told_with_what_to_do(trap: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        import_callable("os:system", "task.name")
    assert str(raised.value) == (
        "config: task.name = 'os:system' would run code of the module 'os', which is not trusted; if "
        "you trust this code, add --trust os, or set the environment variable COVEY_TRUST=os"
    )
