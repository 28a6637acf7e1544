"""The line of a run in a comparison that is not finished."""

from __future__ import annotations

from pathlib import Path

from covey.lab.compare.launch import Job, run_progress


def test_a_graded_reward_is_shown_beside_the_accuracy(tmp_path: Path) -> None:
    texts = dict.fromkeys(("config_toml", "common_toml", "key"), "")
    job = Job(arm="grpo", seed=0, folder=str(tmp_path), threads=1, **texts)
    assert run_progress(job, "steps", 4) == ("0%", "0", "not evaluated")
    (tmp_path / "steps.jsonl").write_text('{"step": 3}\n')
    (tmp_path / "eval.jsonl").write_text(
        '{"step": 3, "greedy": {"value": 0.0}, "reward": {"value": -1.5656}}\n'
    )
    assert run_progress(job, "steps", 4) == ("75%", "3", "accuracy 0.0%, reward -1.566")
