"""JSON objects of requests: fields of exactly their types, no other fields, and values that are refused.

`octile.serve.http.neutral` has the fields of other servers that are accepted with values that change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from octile.serve.http.neutral import Values, is_neutral
from octile.validation import quoted


class Body(BaseModel):
    """A JSON object whose fields have exactly their types, and which has no other fields."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)
    neutral: ClassVar[Mapping[str, Values]] = {}  # other fields, with their values that change nothing

    @model_validator(mode="after")
    def _has_no_other_fields(self) -> Self:
        for name, value in (self.model_extra or {}).items():  # extra="forbid" would describe each of them
            if name not in self.neutral:
                raise PydanticCustomError("unknown_field", "{name}", {"name": name})
            if not is_neutral(value, self.neutral[name]):
                raise UnsupportedError(name, value, _one_of(self.neutral[name]))
        return self


class UnsupportedError(ValueError):
    """A field has a value that would change the result in a way that is not supported."""

    def __init__(self, field: str, value: object, needed: str):
        super().__init__(f"{field} must be {needed}, not {describe_value(value)}")


def refuse(body: Body, field: str, value: object, needed: str) -> None:
    """Refuse a value that is not the neutral one."""
    if value:
        raise UnsupportedError(field, value, needed)


def _one_of(values: Values) -> str:
    """Describe the values that change nothing, for a message."""
    return " or ".join([*(json.dumps(value) for value in values), "null"])


def describe_value(value: object) -> str:
    """What came, for a message; true, false and null as JSON has them."""
    return json.dumps(value) if value is None or isinstance(value, bool) else quoted(value)
