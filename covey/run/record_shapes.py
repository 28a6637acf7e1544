"""What the files of a run hold, as far as some reader relies on it. No torch here."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter

from covey.run.read_files import Shape

Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**53)]


class _Row(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Step(_Row):
    """A line of steps.jsonl: beside the reward's name, all is numbers."""

    step: Count
    reward_id: str | None = None
    __pydantic_extra__: dict[str, Number | bool | None]


class _Estimate(_Row):
    value: Number
    low: Number
    high: Number


class _Evaluation(_Row):
    """A line of eval.jsonl. All that is not named here is an estimate, such as `pass@4`."""

    step: Count
    prompts: Count
    greedy: _Estimate
    parts: dict[str, Number]
    mean_tokens: Number | None = None
    unscored: Count = 0
    __pydantic_extra__: dict[str, _Estimate | Number]


class _Rollout(_Row):
    """A line of rollouts/*.jsonl; what older versions did not write has a default."""

    prompt_id: str
    prompt: str
    # Version 0.1 called it "answer".
    target: str = Field(validation_alias=AliasChoices("target", "answer"))
    text: str
    reward: Number | None
    success: bool | None
    advantage: Number | None
    parts: dict[str, Number] = {}
    finish: str = ""
    sample: Count = 0
    prompt_tokens: list[Count] = []
    tokens: list[Count] = []
    sampler_logp: list[Number] = []
    trained: bool | list[bool] = True
    policy_version: Count = 0
    reward_id: str = ""
    task: str = ""
    info: dict[str, Any] = {}


class _Item(_Row):
    """A line of evaluations/*.jsonl."""

    prompt_id: str
    prompt: str
    expected: str
    answer: str
    right: bool | None
    tokens: Count
    finish: str


class _Environment(_Row):
    """environment.json, where every entry may be missing."""

    kind: str | None = None
    config: str | None = None
    threads: int | None = None
    command: list[str] = []
    device: str | None = None
    reward: str | None = None
    key: str | None = None
    packages: dict[str, str | None] = {}
    git: dict[str, Any] = {}


class _Saved(_Row):
    """A line of checkpoints.jsonl."""

    step: Count


STEP: Shape = TypeAdapter(_Step)
EVALUATION: Shape = TypeAdapter(_Evaluation)
ROLLOUT: Shape = TypeAdapter(_Rollout)
ITEM: Shape = TypeAdapter(_Item)
ENVIRONMENT: Shape = TypeAdapter(_Environment)
SAVED: Shape = TypeAdapter(_Saved)
