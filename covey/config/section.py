"""Base classes of the sections of the configuration, and types of their values."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MOST = 10**9
"""Upper bound for numbers of steps, prompts and tokens; a larger number is probably a typo."""
Positive = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(gt=0, le=1)]
Names = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
"""A list of names; a single name may be given without brackets."""
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,4})?)$")]


class Section(BaseModel):
    """A section of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Named(Section):
    """A table whose `name` names a function; every other key is an option of the function."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of this table that are not options: the name and all declared fields."""
        return {key: getattr(self, key) for key in type(self).model_fields}

    @property
    def options(self) -> dict[str, Any]:
        """All keys of the table except its declared fields."""
        return dict(self.model_extra or {})
