"""The Python API: scripts and notebooks."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, get_args, get_type_hints

import pytest

import covey
from covey import api
from covey.cli.main import run as command
from covey.errors import ConfigError, DataError, RunError
from covey.lab.compare import launch
from covey.records.folder import RunFolder
from covey.rewards.user import function_reward
from covey.tasks.rows import SHARE, dataset_task, with_share
from covey.tasks.task import shared_prompts
from tests.cli.test_compare import ForkedRun
from tests.processes import wait_until

ROOT = Path(__file__).parent.parent
ROWS = [
    {"prompt": f"{a}+{b}?", "target": f"{a + b:02d}", "size": a}
    for a in range(10, 20)
    for b in (1, 2)
]
SMALL = {
    "model.device": "cpu", "train.steps": 2, "rollout.prompts_per_step": 4, "rollout.group_size": 4,
    "rollout.max_tokens": 24, "evaluate.every": 2, "train.mini_batches": 1,
}  # fmt: skip


FEW = {"rollout.max_tokens": 8, "model.device": "cpu"}


def correct(completions: list[str], target: list[str], **columns: Any) -> list[float]:
    return [
        float(f"<answer>{t}</answer>" in text) for text, t in zip(completions, target, strict=True)
    ]


def short(completions: list[str], **columns: Any) -> list[float]:
    return [-0.001 * len(text) for text in completions]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def small(tmp_path: Path, name: str = "run", **more: Any) -> covey.TrainResult:
    options = {"model": "embedded", "dataset": ROWS, "rewards": [correct, short], "quiet": True}
    return covey.train(**{**options, "run": tmp_path / name, **SMALL, **more})


def test_the_public_api_is_what_it_says_and_imports_nothing_heavy() -> None:
    for name in covey.__all__:
        assert getattr(covey, name) is not None
    assert dir(covey) == sorted(covey.__all__)
    code = "import sys, covey; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = covey.nothing


def classes_in(annotation: Any) -> set[type]:
    """Return the classes of Covey in a type annotation."""
    inner = {found for part in get_args(annotation) for found in classes_in(part)}
    own = isinstance(annotation, type) and annotation.__module__.startswith("covey.")
    return inner | ({annotation} if own else set())


def test_the_types_of_arguments_and_results_are_public_and_documented() -> None:
    from covey.evaluation.evaluate import Evaluation

    found: set[type] = set()
    for function in (covey.train, covey.evaluate, covey.compare, covey.load_config):
        hints = get_type_hints(function, {**vars(api), "Evaluation": Evaluation})
        found = found.union(*map(classes_in, hints.values()))
    names = {cls.__name__ for cls in found}
    assert names >= {"Config", "Tracker", "TrainResult", "Evaluation", "CompareResult"}
    assert names <= set(covey.__all__)
    page = (ROOT / "docs/api.md").read_text()
    public = page.partition("## Public names")[2]
    assert {name for name in covey.__all__ if f"`{name}`" not in public} == set()
    for function in (covey.train, covey.evaluate, covey.compare):
        assert "quiet" in inspect.signature(function).parameters
    table = re.findall(r"^\| (`.*?) \|", page.partition("## Public names")[0], re.MULTILINE)
    described = {name for row in table for name in re.findall(r"`(\w+)`", row)}
    assert described >= set(inspect.signature(covey.train).parameters) - {"overrides"}


def test_a_run_on_own_data_with_own_functions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Mapping[str, Any]] = []
    result = small(tmp_path, callbacks=[seen.append])
    assert capsys.readouterr().out == ""
    assert [m["step"] for m in result.metrics] == [m["step"] for m in seen] == [1, 2]
    assert (result.step, result.stopped) == (2, None)
    assert result.evaluation is not None
    assert result.evaluation["step"] == 2
    rows = lines(result.folder / "rollouts/000001.jsonl")
    for row in rows:
        value = float(f"<answer>{row['target']}</answer>" in row["text"])
        assert row["parts"] == {"correct": value, "short": -0.001 * len(row["text"])}
        assert row["reward"] == pytest.approx(value - 0.001 * len(row["text"]))
        assert row["success"] == (value == 1.0)
        assert row["info"]["size"] == int(row["prompt"][:2])
    assert sum(p.numel() for p in result.model.parameters()) == 460_160


def test_it_is_the_run_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = covey.train("arithmetic", run=tmp_path / "a", **SMALL)
    notes = capsys.readouterr().out.partition("training:")[0]
    from covey.cli.main import run as command

    words = [w for k, v in SMALL.items() for w in ("--set", f"{k}={v}")]
    assert command(["train", "arithmetic", "--run", str(tmp_path / "b"), *words]) == 0
    assert capsys.readouterr().out.partition("training:")[0] == notes
    assert notes.startswith("sampling: ")
    with pytest.raises(covey.CoveyError, match="already contains files; pass another run="):
        covey.train("arithmetic", run=tmp_path / "a")
    other = RunFolder(tmp_path / "b").steps()
    for a, b in zip(made.metrics, other, strict=True):
        assert {k: v for k, v in a.items() if "time" not in k} == {
            k: v for k, v in b.items() if "time" not in k
        }


@pytest.mark.parametrize("how", [{"held_out": []}, {"evaluate.every": 0}])
def test_without_evaluations_every_row_is_trained_on(tmp_path: Path, how: dict[str, Any]) -> None:
    size = {"rollout.prompts_per_step": len(ROWS), "rollout.group_size": 2, "rollout.max_tokens": 2}
    settings = {k: v for k, v in SMALL.items() if k != "evaluate.every"} | size | {"train.steps": 1}
    given = {"model": "embedded", "dataset": ROWS, "rewards": short, "quiet": True}
    result = covey.train(**given, run=tmp_path / "run", **settings, **how)
    rows = lines(result.folder / "rollouts/000001.jsonl")
    assert {row["prompt"] for row in rows} == {row["prompt"] for row in ROWS}
    assert result.evaluation is None
    again = {k: v for k, v in given.items() if k != "model"} | {"resume": result.folder}
    with pytest.raises(DataError, match="no held-out prompts"):
        covey.train(**again, **{"train.steps": 2, "evaluate.every": 1})


def test_the_held_out_share_is_a_setting_of_the_task(tmp_path: Path) -> None:
    half = with_share(dataset_task(ROWS), {SHARE: 0.5})
    assert len(half.held_out()) > len(ROWS) // 4
    assert [*half.train(), *half.held_out()] != [*half.prompts]  # chosen by a hash
    result = small(tmp_path, **{f"task.{SHARE}": 0.5, "train.steps": 1, "evaluate.every": 1})
    assert result.evaluation is not None
    assert result.evaluation["prompts"] == len(half.held_out())
    with pytest.raises(ConfigError, match="held_out_share = 2"):
        with_share(dataset_task(ROWS), {SHARE: 2})


def test_a_callback_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    result = small(tmp_path, callbacks=[lambda metrics: "seen enough"])
    assert (result.step, result.stopped) == (1, "seen enough")


def test_a_finding_ends_the_run_if_the_settings_say_so(tmp_path: Path) -> None:
    settings = {"train.steps": 12, "rollout.max_tokens": 4, "evaluate.every": 0}
    nothing = lambda completions, **columns: [0.0] * len(completions)  # noqa: E731
    result = small(tmp_path, rewards=nothing, **settings, **{"train.stop_on": ["no_signal"]})
    assert (result.step, result.stopped) == (3, "train.stop_on: no_signal since step 1")


def test_the_best_checkpoint_is_kept_and_patience_ends_the_run(tmp_path: Path) -> None:
    settings = {"train.steps": 8, "evaluate.every": 1, "save.every": 0, "save.keep": 1}
    result = small(tmp_path, **{**settings, "save.best": "greedy", "train.patience": 2})
    run = RunFolder(result.folder)
    values = [row["greedy"]["value"] for row in run.evaluations()]
    best = values.index(max(values))
    assert result.stopped is not None
    assert f"train.patience: 2 measurements not better than step {best} " in result.stopped
    assert result.step == best + 2
    kept = [step for step, _ in run.checkpoints()]
    assert kept == ([best, best + 2] if best else [2])
    assert result.best == (
        run.path / f"checkpoints/{best:06d}" if best else run.checkpoints()[0][1]
    )


def test_an_interrupted_run_is_resumed_with_its_objects(tmp_path: Path) -> None:
    def stop(metrics: Mapping[str, Any]) -> None:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="saved step 1 of 2; resume with"):
        small(tmp_path, callbacks=[stop])
    first = RunFolder(tmp_path / "run")
    with pytest.raises(
        ConfigError, match="was started with the argument dataset; pass the same argument again"
    ):
        covey.train(resume=first.path)
    rest = covey.train(resume=first.path, dataset=ROWS, rewards=[correct, short], quiet=True)
    whole = small(tmp_path, "whole")
    plain = [{k: v for k, v in m.items() if "time" not in k} for m in rest.metrics]
    assert plain == [{k: v for k, v in m.items() if "time" not in k} for m in whole.metrics]


SCRIPT = """
import sys
import covey
from tests.test_api import ROWS, SMALL, correct, short

settings = {**SMALL, "train.steps": 100000, "evaluate.every": 0, "save.every": 0}
print("ready")
result = covey.train(
    model="embedded", dataset=ROWS, rewards=[correct, short], run=sys.argv[1], trackers=[],
    **settings,
)
print("the script goes on")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_script_after_saving_and_says_how_to_resume(
    number: signal.Signals, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(run.path)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: process.poll() is not None or len(run.steps()) >= 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    step = run.steps()[-1]["step"]
    assert process.returncode in ((1, -number) if number == signal.SIGINT else (128 + number,))
    assert out.splitlines()[0] == "ready"
    said = f"{number.name}: saved step {step} of 100000; resume with: covey.train(resume="
    assert said in out.splitlines()[-1]
    assert ("KeyboardInterrupt: " in err) == (number == signal.SIGINT)
    assert [number for number, _ in run.checkpoints()][-1] == step
    more = {"train.steps": step + 1}
    rest = covey.train(resume=run.path, dataset=ROWS, rewards=[correct, short], quiet=True, **more)
    assert [m["step"] for m in rest.metrics] == [*range(1, step + 2)]


def test_a_changed_reward_stops_a_resume_unless_it_is_allowed(tmp_path: Path) -> None:
    def reward(code: str) -> Any:
        file = tmp_path / f"own_{len(list(tmp_path.iterdir()))}.py"
        file.write_text(code)
        return runpy.run_path(str(file))["long"]

    code = "UNIT = 0.1\n\ndef long(completions, **columns):\n    return [len(c) * UNIT for c in completions]\n"
    given: dict[str, Any] = {"dataset": ROWS, "quiet": True}
    run = small(tmp_path, rewards=reward(code)).folder
    same = reward("# my reward\nN = 3\n" + code)
    covey.train(resume=run, rewards=same, **given, **{"train.steps": 3})
    other = reward(code.replace("0.1", "0.2"))
    with pytest.raises(ConfigError, match="allow_changed_reward"):
        covey.train(resume=run, rewards=other, **given, **{"train.steps": 4})
    allowed = {**given, "allow_changed_reward": True, "train.steps": 4}
    covey.train(resume=run, rewards=other, **allowed)
    covey.train(resume=run, rewards=other, **given, **{"train.steps": 5})
    used = [row["reward_id"] for row in RunFolder(run).steps()]
    assert used[0] == used[2] != used[3] == used[4]
    with pytest.raises(ConfigError, match="allow_changed_reward"):
        covey.train(rewards=other, **allowed)


def test_an_sft_run_is_not_resumed_with_rl(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert command(["sft", "--run", str(run), "--smoke", "--set", "sft.evaluate_every=0"]) == 0
    with pytest.raises(RunError, match="is an SFT run; resume it with: covey sft --resume "):
        covey.train(resume=run, quiet=True, **{"train.steps": 3})
    assert [row["step"] for row in RunFolder(run).steps()] == [1, 2]


COMPARED = {
    "train.steps": 1, "train.mini_batches": 1, "evaluate.every": 1, "evaluate.prompts": 4,
    "rollout.prompts_per_step": 2, "rollout.group_size": 2, "rollout.max_tokens": 8,
    "task.train_size": 50, "model.device": "cpu",
}  # fmt: skip


def test_a_comparison_returns_its_report_and_the_same_call_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "start", ForkedRun)
    hungry = "hungry: rollout.prompts_per_step=51"
    arguments: dict[str, Any] = {"algorithms": ["grpo", "gspo"], "arms": [hungry], "seeds": 1}
    arguments |= {"model": "embedded", "parallel": 1, **COMPARED}
    result = covey.compare("arithmetic", **arguments, quiet=True)
    assert capfd.readouterr() == ("", "")
    assert result.folder == Path("comparisons/arithmetic-1")
    assert result.report == json.loads((result.folder / "report.json").read_text())
    assert [arm["name"] for arm in result.report["arms"]] == ["grpo", "gspo", "hungry"]
    (failed,) = result.failed
    assert failed.startswith("hungry seed 0: ")
    assert "a step needs 51 different prompts" in failed

    started: list[str] = []
    monkeypatch.setattr(launch, "start", lambda job: started.append(job.arm) or ForkedRun(job))
    again = covey.compare("arithmetic", **arguments)
    assert (again.folder, started) == (result.folder, ["hungry"])
    shown = capfd.readouterr()
    assert "3 runs of 1 steps: 3 arms, seeds 0" in shown.out
    assert f"failed: {failed}" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithms": ["grppo"]}, "objective.name = 'grppo' is not a known algorithm"),
        ({"algorithms": ["grpo"]}, "nothing to compare: give at least two arms"),
        (
            {"algorithms": "grpo,gspo"},
            r"algorithms must be a list, such as algorithms=\['grpo,gspo'",
        ),
        ({"arms": ["frozen"]}, "the arm 'frozen' must have the form 'NAME: key=value"),
        (
            {"arms": ["a: seed=3"]},
            "arm a sets seed = 3, but all arms must have the same seed; set seed for all",
        ),
        ({"arms": ["a: nothing"]}, "the setting 'nothing' must have the form key=value"),
        ({"seeds": 0}, "seeds = 0 must be at least 1"),
        ({"seeds": "3"}, "seeds must be an integer, not an object of type str"),
        ({"parallel": 1.5}, "parallel must be an integer, not an object of type float"),
        ({"algorithms": [1]}, "algorithms must be a list of names, not a list of int"),
        ({"folder": 5}, "folder must be a path, not an object of type int"),
        ({"parallel": 0}, "parallel = 0 must be at least 1"),
        ({"model": object()}, "a name or a folder, not an object of type object"),
        ({"model": "nowhere/x", "algorithms": ["grpo", "gspo"]}, "nowhere/x"),
        ({"train.stepz": 3, "algorithms": ["grpo", "gspo"]}, "train.stepz is not a setting"),
    ],
)
def test_mistakes_in_a_comparison_name_the_arguments_of_python(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "report.json").write_text("{}")  # an earlier report is not returned
    with pytest.raises(covey.CoveyError, match=message) as caught:
        covey.compare("arithmetic", **{"folder": tmp_path / "new", **arguments})
    assert "--" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    with pytest.raises(covey.CoveyError, match="do not belong to a comparison; choose another fol"):
        covey.compare(algorithms=["grpo", "gspo"], folder=tmp_path)


SCRIPT_THAT_COMPARES = """
import sys
import covey
from tests.test_api import ROWS, SMALL, short

def correct(completions, target, **columns):
    return [float(t in text) for t, text in zip(target, completions)]

def compared():
    return covey.compare(
        model="embedded", dataset=ROWS, rewards={correct: 1.0, short: 0.5}, quiet=True,
        algorithms=["grpo", "dr_grpo"], seeds=1, folder=sys.argv[1], **SMALL,
    )
"""


def test_a_comparison_trains_on_own_data_with_own_functions(tmp_path: Path) -> None:
    script, folder = tmp_path / "mine.py", tmp_path / "here" / "compared"
    main = SCRIPT_THAT_COMPARES + "\nif __name__ == '__main__':\n    print(compared().failed)\n"
    for text, code in ((main, 0), (SCRIPT_THAT_COMPARES + "\ncompared()\n", 1)):
        script.write_text(text)
        done = subprocess.run(
            [sys.executable, str(script), str(folder)],
            cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        if code:
            assert "__main__" in done.stderr
    run = RunFolder(folder / "runs/grpo/seed-0")
    (saved,) = (folder.parent / "data").iterdir()
    assert len(lines(saved)) == len(ROWS)
    for row in lines(run.path / "rollouts/000001.jsonl"):
        assert row["parts"]["short"] == pytest.approx(-0.001 * len(row["text"]))
    with pytest.raises(ConfigError, match="cannot be imported"):
        covey.compare(
            dataset=ROWS, rewards=lambda completions, **k: [], algorithms=["grpo", "rloo"]
        )


def test_a_quiet_call_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    objects: dict[str, Any] = {"dataset": ROWS, "rewards": [correct, short]}
    with_long_prompt = {**objects, "dataset": [*ROWS[:2], {"prompt": "9" * 2000, "target": "9"}]}
    skip = {"rollout.long_prompts": "skip", "rollout.max_tokens": 8, "model.device": "cpu"}
    run = small(tmp_path).folder
    covey.evaluate("embedded", **with_long_prompt, **skip, quiet=True)
    for step in (3, 4):
        with (run / "steps.jsonl").open("a") as file:
            file.write("damaged\n")
        if step == 4:
            assert capfd.readouterr() == ("", "")
        covey.train(resume=run, **objects, quiet=step == 3, **{"train.steps": step})
    shown = capfd.readouterr()
    assert "covey: " in shown.err
    assert "step 4" in shown.out
    covey.evaluate("embedded", **with_long_prompt, **skip)
    assert "covey: 1 of 3 held-out prompts have more than" in capfd.readouterr().err


def test_an_evaluation_and_a_configuration() -> None:
    config = covey.load_config({"train": {"steps": 7}}, **{"rollout.group_size": 4})
    assert (config.train.steps, config.rollout.group_size) == (7, 4)
    found = covey.evaluate(
        "embedded",
        dataset=ROWS[:6],
        rewards=correct,
        **{"rollout.max_tokens": 24, "model.device": "cpu"},
    )
    assert found.prompts == 6
    assert set(found.parts) == {"correct"}
    again = covey.evaluate("embedded", dataset=iter(ROWS[:6]), rewards=correct, **FEW)
    assert [item.prompt.id for item in again.items] == [item.prompt.id for item in found.items]


def broken(completions: list[str], **columns: Any) -> list[float]:
    raise OSError("no grader")


def test_an_evaluation_without_any_score_is_an_error() -> None:
    with pytest.raises(covey.CoveyError, match="embedded: none of the 6 completions could be sco"):
        covey.evaluate("embedded", dataset=ROWS[:6], rewards=broken, **FEW)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": []}, "at least one reward function"),
        ({"rewards": [correct, correct]}, "two functions have the name correct"),
        (
            {"rewards": {correct: float("nan")}},
            "the weight of correct must be a finite number, not nan",
        ),
        ({"dataset": [{"target": "1"}]}, "has no"),
        ({"dataset": [1]}, "is not a dict but int"),
        ({"dataset": ROWS[:1]}, "at least two rows"),
        ({"config": "arithmetic", "train.stepz": 3}, "train.stepz is not a setting"),
        ({"train.steps": None}, "config: train.steps must not be None"),
        (
            {"reward.grade": correct},
            "config: reward.grade is an object of type function; a setting",
        ),
        ({"rewards": {correct: "2"}}, "the weight of correct must be a finite number, not 2"),
        ({"rewards": "math_answer"}, "to choose a reward by its name, set reward.name"),
        ({"rewards": 5}, "rewards must be a function, a list of functions, or a dict of functions"),
        ({"dataset": 5}, "dataset must be a list of dicts, a datasets.Dataset or a JSON Lines fil"),
        ({"dataset": {"prompt": ["1+1?"]}}, "train row 0 is not a dict but str"),
        ({"held_out": 5}, "held_out must be a list of dicts"),
        (
            {"config": 5},
            "config must be a Config, a dict, a TOML file or the name of a recipe, not",
        ),
        ({"run": 5}, "run must be a path, not an object of type int"),
        ({"resume": 5}, "resume must be a path, not an object of type int"),
        ({"callbacks": correct}, "callbacks must be a list of functions, not an object of type fu"),
        ({"callbacks": None}, "callbacks must be a list of functions, not an object of type None"),
        ({"callbacks": [correct, 5]}, "callbacks must be a list of functions, not a list of fun"),
        ({"trackers": "wandb"}, "trackers must be a list of names and covey.Tracker objects, not"),
        ({"environment": "calculator"}, "environment: pass a class, or a function that creates"),
    ],
)
def test_mistakes_are_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        covey.train(**arguments)


def test_settings_may_be_paths_and_numbers_of_numpy(tmp_path: Path) -> None:
    import numpy as np

    file = tmp_path / "rows.jsonl"
    given = {
        "task.name": "jsonl", "task.train_file": file, "train.steps": np.int64(3),
        "optimizer.learning_rate": np.float32(0.25), "filter.dynamic_sampling": np.bool_(True),
        "objective.part_weights": np.array([1.0, 2.5]), "train.stop_after": {"tokens": np.int8(5)},
    }  # fmt: skip
    sections = {"model": {"path": file}, "train": {"steps": np.int64(3)}}
    for config in (covey.load_config(None, **given), covey.load_config({}, **given)):
        assert config.task.options["train_file"] == str(file)
        assert (config.train.steps, config.optimizer.learning_rate) == (3, 0.25)
        assert config.filter.dynamic_sampling is True
        assert config.objective.options["part_weights"] == [1.0, 2.5]
        assert config.train.stop_after.tokens == 5
    assert covey.load_config(sections).model.path == str(file)
    assert api._settings({"task.train_file": file}) == [f'task.train_file="{file}"']  # compare's


def test_weights_and_a_running_event_loop() -> None:
    prompt = dataset_task(ROWS).train()[0]
    reward: Any = function_reward({correct: 2.0, short: 1.0})
    text = f"<answer>{prompt.target}</answer>"

    async def inside() -> Any:
        return reward(prompt, text)

    score = asyncio.run(inside())
    assert score.reward == pytest.approx(2.0 - 0.001 * len(text))
    assert reward(prompt, text) == score


def test_the_example_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(ROOT / "examples/own_data.py"))
    assert len(names["result"].metrics) == 10
    assert (names["result"].folder / "success.html").stat().st_size > 1000
    code = (ROOT / "examples/own_data.py").read_text().partition('"""\n\n')[2]
    assert len([line for line in code.splitlines() if line.strip()]) < 20
    assert code.strip() in (ROOT / "docs/api.md").read_text()


def test_evaluations_have_a_reward_of_their_own(tmp_path: Path) -> None:
    result = small(
        tmp_path, rewards=short, **{"evaluate.reward.name": "think_answer", "train.steps": 1}
    )
    (trained,) = result.metrics
    assert trained["objective/scores"] < 0.0
    first, last = lines(tmp_path / "run" / "eval.jsonl")
    for row in (first, last):
        assert 0.0 <= row["reward"]["low"] <= row["reward"]["value"] <= 1.0
        assert (
            {name for name in row if name.startswith("parts/")}
            == {f"parts/{name}" for name in row["parts"]}
            != set()
        )
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["evaluation_reward"].startswith("think_answer")
    assert environment["reward"] != environment["evaluation_reward"]
    with pytest.raises(
        ConfigError, match=r"evaluate\.reward\.name = 'think_answr' is not a known reward"
    ):
        small(tmp_path, "other", **{"evaluate.reward.name": "think_answr"})


def test_eval_of_a_run_with_own_objects_names_the_function_of_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small(tmp_path, **{"train.steps": 1, "evaluate.every": 0}).folder
    assert command(["eval", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    advice = "call covey.evaluate(..., dataset=..., rewards=...) in Python"
    assert line.endswith(advice)
    with pytest.raises(ConfigError, match=re.escape(advice)):
        covey.evaluate(run)


def test_a_run_is_evaluated_at_its_newest_checkpoint(tmp_path: Path) -> None:
    run = small(
        tmp_path, **{"save.every": 1, "evaluate.every": 0, "optimizer.learning_rate": 0.01}
    ).folder
    newest = max((run / "checkpoints").iterdir())
    objects: dict[str, Any] = {"dataset": ROWS[:6], "rewards": correct}
    found = covey.evaluate(run, **objects)
    same = covey.evaluate(newest, run / "config.toml", **objects)
    texts = [[item.greedy.text for item in evaluation.items] for evaluation in (found, same)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 6


@pytest.mark.parametrize("function", [covey.train, covey.evaluate])
def test_a_model_object_is_refused_in_one_line(function: Any) -> None:
    with pytest.raises(covey.CoveyError, match="a name or a folder, not an object of type object"):
        function(model=object(), dataset=ROWS, rewards=correct)


def test_equal_prompts_are_on_one_side_of_the_split() -> None:
    single, repeated = dataset_task(ROWS), dataset_task(ROWS + ROWS[::-1] + ROWS)
    assert shared_prompts(repeated.train(), repeated.held_out()) == []
    assert len(repeated.train()) + len(repeated.held_out()) == 3 * len(ROWS)
    assert {p.text for p in repeated.held_out()} == {p.text for p in single.held_out()}
    last = dataset_task([*ROWS[:3], ROWS[0]])  # no row is chosen by its hash
    assert [p.id[-1] for p in last.held_out()] == ["0", "3"]
    same = dataset_task(ROWS[:1] * 4)
    assert (len(same.train()), len(same.held_out())) == (3, 1)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"trackers": []}, []), ({"trackers": ["trackio"]}, ["trackio"]), ({}, ["tensorboard"])],
)
def test_given_trackers_replace_those_of_the_settings(
    given: dict[str, Any], named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[list[str]] = []
    monkeypatch.setattr("covey.records.trackers.registry.find_spec", lambda package: True)
    monkeypatch.setattr(
        "covey.loop.make_trackers", lambda names, *rest: used.append(list(names)) or []
    )
    small(
        tmp_path,
        config={"trackers": ["tensorboard"]},
        **{"train.steps": 1, "evaluate.every": 0},
        **given,
    )
    assert used == [named]


class Asking(covey.Environment):
    """An environment that asks once more after every turn."""

    quick = True  # in this process
    asked: ClassVar[list[Any]] = []

    def reset(self, prompt: covey.Prompt, seed: int) -> Any:
        return prompt.messages

    def step(self, message: Any) -> covey.Step:
        self.asked.append(message)
        return covey.Step(messages=[{"role": "user", "content": "and?"}])


def test_an_evaluation_plays_an_environment_of_its_own(tmp_path: Path) -> None:
    objects: dict[str, Any] = {"dataset": ROWS[:4], "rewards": correct, "environment": Asking}
    turns = {"environment.max_turns": 2, "environment.max_tokens": 400}
    Asking.asked.clear()
    found = covey.evaluate("embedded-calculator", **objects, samples=2, **turns, **FEW)
    assert found.prompts == 4
    assert Asking.asked
    run = covey.train(
        model="embedded-calculator", run=tmp_path / "run", quiet=True, **objects, **turns,
        **{**SMALL, "train.steps": 1, "evaluate.every": 0, "rollout.max_tokens": 8},
    ).folder  # fmt: skip
    Asking.asked.clear()
    assert covey.evaluate(run, **objects).prompts == 4
    assert Asking.asked
    advice = re.escape("call covey.evaluate(..., environment=...) in Python")
    with pytest.raises(ConfigError, match=advice):
        covey.evaluate(run, dataset=ROWS[:4], rewards=correct)
    with pytest.raises(ConfigError, match="samples must be an integer, not an object of type str"):
        covey.evaluate(run, **{**objects, "samples": "4"})


def test_an_evaluation_plays_the_environment_of_the_settings(tmp_path: Path) -> None:
    settings = {"evaluate.prompts": 8, "model.device": "cpu"}
    found = covey.evaluate("embedded-calculator", "agent-calculator", samples=4, **settings)
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    out = tmp_path / "items.jsonl"
    target = ["eval", "embedded-calculator", "--config", "agent-calculator", "--samples", "4"]
    assert command([*target, "--out", str(out), *words]) == 0
    rows = [{name: row[name] for name in row if name != "model"} for row in lines(out)]
    assert rows == json.loads(json.dumps([item.row() for item in found.items], default=str))
