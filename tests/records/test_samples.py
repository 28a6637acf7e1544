"""The page of sampled completions: the highest and lowest rewards, each completion once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from covey.cli.main import run as covey
from covey.errors import RunError
from covey.records.folder import RunFolder
from covey.records.samples import SamplePage, read_samples
from covey.types import Group, Prompt, Rollout

QUICK = (
    "model.device=cpu", "train.steps=3", "rollout.prompts_per_step=4", "rollout.group_size=4",
    "evaluate.every=0", "save.every=1", "save.keep=10",
)  # fmt: skip


def prompt(name: str = "t/1", *, text: str = "1+1?", target: str = "2") -> Prompt:
    return Prompt(id=name, task="t", messages=({"role": "user", "content": text},), target=target)


def rollout(name: str, sample: int, reward: float | None, text: str = "two") -> Rollout:
    return Rollout.single_turn(
        prompt_id=name,
        sample=sample,
        prompt_tokens=(1,),
        tokens=(2, 3, 4),
        trained=(True,) * 3,
        sampler_logp=(0.0,) * 3,
        text=text,
        finish="stop",
        policy_version=0,
        reward=reward,
        success=None if reward is None else reward >= 1,
        parts={} if reward is None else {"accuracy": reward, "format": 0.25},
        reward_id="mine@1#abc",
    )


def samples_page(step: int, groups: list[Group], count: int) -> str:
    page = SamplePage(count)
    page.add(step, groups)
    return page.text(step)


def groups_of(rewards: list[float | None], samples: int = 4) -> list[Group]:
    """Return groups with these rewards; every completion's text is its number."""
    groups = []
    for start in range(0, len(rewards), samples):
        name = f"t/{start // samples}"
        some = rewards[start : start + samples]
        rollouts = [rollout(name, n, r, f"number {start + n}") for n, r in enumerate(some)]
        groups.append(Group(prompt=prompt(name), rollouts=tuple(rollouts)))
    return groups


def page_of(rewards: list[float | None], count: int) -> str:
    return samples_page(7, groups_of(rewards), count)


def shown(page: str) -> tuple[list[int], list[int]]:
    """Return the numbers of the completions under Highest and under Lowest."""
    high, low = page.split("## Highest")[1].split("## Lowest")
    return tuple(
        [int(n) for n in re.findall(r"^    number (\d+)$", part, re.M)] for part in (high, low)
    )  # type: ignore[return-value]


def blocks(page: str) -> list[list[str]]:
    """Return the verbatim blocks as CommonMark reads them: blank lines do not end one."""
    found: list[list[str]] = []
    inside, blank = False, True
    for line in page.split("\n"):
        if not line.strip():
            blank = True
        elif line.startswith("    ") and (inside or blank):
            if not inside:
                found.append([])
            found[-1].append(line[4:])
            inside = True
        else:
            inside = blank = False
    return found


def test_the_highest_come_first_and_the_lowest_after_them() -> None:
    page = page_of([0.1, 0.9, None, 0.5, 1.0, 0.2, 0.3, 0.4], 2)
    assert shown(page) == ([4, 1], [0, 5])
    assert "7 completions, 1 not scored. Reward: `mine@1#abc`" in page
    assert "### 1. 1, correct, 3 tokens, stop" in page
    assert "### 2. 0.9, incorrect, 3 tokens, stop" in page
    assert "Step 7, `t/1` sample 0; parts: `accuracy 1, format 0.25`; target: `2`" in page
    assert page.startswith("# Completions of step 7\n")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 100])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9])
def test_each_completion_is_shown_at_most_once_and_as_many_as_fit(count: int, size: int) -> None:
    page = page_of([float(n % 3) for n in range(size)], count)
    high, low = shown(page)
    assert len(set(high + low)) == len(high) + len(low) == min(2 * count, size)
    assert max(len(high), len(low)) <= count
    assert len(high) - len(low) in (0, 1)
    if high and low:
        assert min(n % 3 for n in high) >= max(n % 3 for n in low)


def test_among_equals_the_choice_is_the_same_each_time_and_not_the_first() -> None:
    rewards: list[float | None] = [1.0] * 40
    page = page_of(rewards, 3)
    assert page == page_of(rewards, 3)
    high, low = shown(page)
    assert sorted(high + low) != [0, 1, 2, 37, 38, 39]


def test_a_step_without_scores_has_a_page_all_the_same() -> None:
    page = page_of([None, None], 3)
    assert shown(page) == ([], [])
    assert "0 completions, 2 not scored" in page


HOSTILE = [
    "# A heading\n\nnot indented\n\n\n- a list",
    "```\nfenced\n```\n~~~",
    "\n\n\n    # deeper\n\t# tab",
    "carriage\r# return\r\n# both\x0b# vertical\x0c# form\u2028# line\u2029# paragraph\x85# next",
    "</pre><script>alert(1)</script>",
    "",
    "   ",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_stays_in_its_block(text: str) -> None:
    """The prompt and the completion, each in a block of its own."""
    group = Group(prompt=prompt(text=text), rollouts=(rollout("t/1", 0, 1.0, text),))
    page = samples_page(1, [group], 5)
    lines = [line for line in text.splitlines() if line.strip()]
    if text.strip():
        assert [[line for line in block if line.strip()] for block in blocks(page)] == [lines] * 2
    outside = [line for line in re.split(r"[\n\r]", page) if line and not line.startswith("    ")]
    assert [line for line in outside if line.startswith("#")] == [
        "# Completions of step 1", "## Highest", "### 1. 1, correct, 3 tokens, stop", "## Lowest",
    ]  # fmt: skip
    assert "<script>" not in "".join(outside)


@pytest.mark.parametrize("text", ["`", "a`b``c", "```", "``<b>``", "x\n\n# heading\n```"])
def test_a_target_stays_between_its_backticks(text: str) -> None:
    group = Group(prompt=prompt(target=text), rollouts=(rollout("t/1", 0, 1.0),))
    (line,) = [line for line in samples_page(1, [group], 5).split("\n") if "target:" in line]
    quoted = line.partition("target: ")[2]
    fence = re.match("`+", quoted)
    assert fence is not None
    inner = quoted[len(fence[0]) : -len(fence[0])]
    assert inner.strip() == " ".join(text.split())
    assert fence[0] not in re.findall("`+", inner)
    assert quoted.endswith(fence[0])


def trained(path: Path, *settings: str) -> RunFolder:
    overrides = [word for setting in (*QUICK, *settings) for word in ("--set", setting)]
    assert covey(["train", "--run", str(path), *overrides]) == 0
    return RunFolder(path)


def pages(run: RunFolder) -> list[str]:
    return sorted(str(file.relative_to(run.path)) for file in run.path.glob("samples/*"))


def test_a_run_writes_pages_and_a_resume_writes_the_same_ones_again(
    tmp_path: Path,
) -> None:
    run = trained(tmp_path / "run", "save.samples_every=1", "save.samples_shown=3")
    assert pages(run) == [f"samples/00000{step}.md" for step in (1, 2, 3)]
    page = (run.path / "samples/000003.md").read_text()
    rows = sorted(run.rollouts(3), key=lambda row: row["reward"])
    titles = re.findall(r"^### \d+\. ([-\d.]+),", page, re.M)
    best_and_worst = [*rows[::-1][:3], *rows[:3]]
    assert [float(t) for t in titles] == [
        pytest.approx(r["reward"], rel=1e-2) for r in best_and_worst
    ]
    assert f"Reward: `{rows[0]['reward_id']}`" in page

    (run.path / "samples/000009.md").write_text("of a step that is no longer known")
    (run.path / "samples/mine.md").write_text("a note of the user's own")
    assert covey(["train", "--resume", str(run.path), "--step", "1"]) == 0
    assert pages(run) == [*(f"samples/00000{step}.md" for step in (1, 2, 3)), "samples/mine.md"]
    assert (run.path / "samples/000003.md").read_text() == page


@pytest.mark.parametrize("count", [1, 3, 5, 100])
def test_a_page_of_several_steps_shows_the_extremes_of_all_of_them(count: int) -> None:
    """As if all completions were of one step; also if the run is resumed between two steps."""
    rewards = [float(n * 37 % 101) for n in range(60)]
    groups = groups_of(list(rewards))
    page = SamplePage(count)
    for step in (1, 2, 3):
        page.add(step, groups[5 * (step - 1) : 5 * step])
    assert shown(page.text(3)) == shown(samples_page(7, groups, count))
    assert page.text(3).startswith("# Completions of steps 1 to 3\n")
    assert "60 completions, 0 not scored" in page.text(3)
    assert len(page.samples) == min(60, 2 * count)


def test_a_checkpoint_has_the_samples_of_a_page_that_is_not_yet_due(tmp_path: Path) -> None:
    page = SamplePage(2)
    page.add(4, groups_of([0.1, 1 / 3, None, 1e-300], samples=2))
    page.save(tmp_path)
    assert read_samples(tmp_path, 2) == page
    (tmp_path / "samples.json").write_text('{"count": 2, "samples": 3}')
    with pytest.raises(
        RunError, match=r"checkpoint .* cannot be read, because samples\.json is invalid"
    ):
        read_samples(tmp_path, 2)


def test_a_resumed_run_writes_the_page_of_all_steps(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "save.samples_every=3", "save.samples_shown=2")
    page = (run.path / "samples/000003.md").read_text()
    rewards = sorted(row["reward"] for step in (1, 2, 3) for row in run.rollouts(step))
    titles = [float(t) for t in re.findall(r"^### \d+\. ([-\d.]+),", page, re.M)]
    assert titles == pytest.approx([*rewards[::-1][:2], *rewards[:2]], rel=1e-2)
    assert covey(["train", "--resume", str(run.path), "--step", "2"]) == 0
    assert (run.path / "samples/000003.md").read_text() == page


@pytest.mark.parametrize(("every", "steps"), [(2, [2]), (0, []), (100, [])])
def test_samples_every_sets_the_steps_with_a_page(
    every: int, steps: list[int], tmp_path: Path
) -> None:
    run = trained(tmp_path / "run", f"save.samples_every={every}")
    assert pages(run) == [f"samples/{step:06d}.md" for step in steps]
