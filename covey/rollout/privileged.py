"""Privileged text: extra text in the teacher's prompt, used when the policy is its own teacher.

Privileged text is a correct completion of the same group, the reward's feedback on the rollout, or
a column of the data. The teacher's prompt contains the privileged text. Given this prompt, the
teacher computes the log-probs of the rollout's tokens. Each rollout stores its teacher prompt, so
checkpoints, replayed groups and rollout files contain teacher prompts too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from covey.errors import ConfigError
from covey.types import Group, Prompt, Rollout

if TYPE_CHECKING:
    from covey.config.schema import Teacher
    from covey.models.language_model import LanguageModel
    from covey.objective import Objective

SUCCESS, FEEDBACK = "success", "feedback"


@dataclass(frozen=True, slots=True, kw_only=True)
class Privileged:
    """Builds the teacher's prompts from privileged text."""

    model: LanguageModel
    """The model that renders and tokenizes the teacher's prompts, without a length limit."""
    context: Mapping[str, str]
    """Maps each source of privileged text to a template with a heading and a placeholder {text}."""
    template: str

    def extended(self, group: Group) -> Group:
        """Add the teacher's prompt to every rollout of a scored group."""
        found: dict[str, tuple[int, ...]] = {}
        rollouts = []
        for rollout in group.rollouts:
            text = self.text(group, rollout)
            if text not in found:  # rollouts often share a correct sibling
                found[text] = self._tokens(group.prompt, text) if text else ()
            fits = len(found[text]) + len(rollout.tokens) <= self.model.context
            rollouts.append(replace(rollout, teacher_prompt=found[text] if fits else ()))
        return replace(group, rollouts=tuple(rollouts))

    def text(self, group: Group, rollout: Rollout) -> str:
        """Return the privileged text for a rollout; empty if no source has a text."""
        said = ((form, _source(name, group, rollout)) for name, form in self.context.items())
        return "\n\n".join(form.replace("{text}", text) for form, text in said if text)

    def _tokens(self, prompt: Prompt, text: str) -> tuple[int, ...]:
        before, after = self.template.split("{prompt}", 1)
        *earlier, last = prompt.messages
        content = before.replace("{context}", text) + str(last["content"])
        content += after.replace("{context}", text)
        return self.model.encode([*earlier, {**last, "content": content}])


def _source(name: str, group: Group, rollout: Rollout) -> str:
    """Return a rollout's privileged text from one source; empty if the source has no text."""
    if name == SUCCESS:
        # A teacher would agree with the rollout's own completion, whatever it is.
        others = [r for r in group.rollouts if r.success and r.sample != rollout.sample]
        return max(others, key=lambda r: (r.reward, -r.sample)).text.strip() if others else ""
    if name == FEEDBACK:
        if rollout.success or rollout.reward is None:
            return ""
        parts = ", ".join(f"{name} {value:g}" for name, value in rollout.parts.items())
        return rollout.feedback.strip() or parts
    return str(_columns(group.prompt).get(name, "")).strip()


def _columns(prompt: Prompt) -> dict[str, Any]:
    return {"target": prompt.target, **prompt.info, **prompt.columns}


def check_context(section: Teacher, prompt: Prompt) -> None:
    """Raise ConfigError if a source of privileged text is neither built in nor a column."""
    known = _columns(prompt)
    for name in section.context:
        if name not in (SUCCESS, FEEDBACK, *known):
            columns = ", ".join(known)
            raise ConfigError(
                f"config: teacher.context contains {name!r}, but the data has no such column; use "
                f"one of the columns {columns}, or {SUCCESS!r} or {FEEDBACK!r}"
            )


def privileged_of(
    section: Teacher, model: LanguageModel, objective: Objective, prompts: Sequence[Prompt]
) -> Privileged | None:
    """Return the teacher's prompt builder; None if the objective needs no privileged text."""
    if "privileged" not in objective.needs:
        return None
    check_context(section, prompts[0])
    whole = replace(model, longest_prompt=None)
    return Privileged(model=whole, context=section.context, template=section.template)
