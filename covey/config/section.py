"""What sections of the configuration are made of: the kinds of table, and of values."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MOST = 10**9
"""Upper bound of steps, prompts and tokens: more is a typo."""
Positive = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(gt=0, le=1)]
Names = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
"""Several names; a single one needs no brackets."""
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,4})?)$")]


class Section(BaseModel):
    """A table of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Named(Section):
    """A table that names a function; every other key is an option of that function."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        """The name, and what else every table of this kind has."""
        return {key: getattr(self, key) for key in type(self).model_fields}

    @property
    def options(self) -> dict[str, Any]:
        """All keys but `name`."""
        return dict(self.model_extra or {})
