"""The instructions reward: the fraction of verifiable instructions that a completion follows."""

from __future__ import annotations

from dataclasses import dataclass

from covey.rewards.instruction_checks import follows, instructions_of
from covey.rewards.score import Reward, Score
from covey.rewards.text import after_thinking
from covey.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions(Reward):
    """The fraction of IFEval's strict checks that the text after the thinking passes.

    The prompt names its instructions in columns (`instruction_id_list` and `kwargs`, as in
    google/IFEval) or in its target (as in open-instruct's RLVR data). An empty completion follows
    no instruction. A completion is a success if all checks pass. The content is not checked, so
    combine this reward with a reward that checks the content.
    """

    all_or_nothing: bool = False
    """If true, the reward is 1 if the completion follows all instructions, and 0 otherwise."""

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Score one completion."""
        said = after_thinking(text)
        wanted = instructions_of(prompt.info, prompt.target)
        followed = [follows(said, name, given) for name, given in wanted]
        share = sum(followed) / len(followed)
        reward = float(all(followed)) if self.all_or_nothing else share
        return Score(
            reward=reward,
            success=all(followed),
            parts={"followed": share},
            attempted=bool(said.strip()),
        )
