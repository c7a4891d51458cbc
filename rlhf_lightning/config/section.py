"""What every part of the config is: typed, closed, frozen.

Only pydantic is imported here and in the modules that build on it, so that a wrong command is answered before
torch is loaded.
"""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A part of the config: unknown keys are refused, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_silent_conversion(cls, values: Any) -> Any:
        """``true`` is no number, although Python counts it as 1; a bare integer will do for a text."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for name, value in values.items():
            annotation = cls.model_fields[name].annotation if name in cls.model_fields else None
            kinds = {annotation, *get_args(annotation)}
            if (isinstance(value, bool) and kinds & {int, float}) or (type(value) is int and str in kinds):
                values[name] = str(value)  # "True" is refused where a number is wanted
        return values
