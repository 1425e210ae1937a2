"""A schema that answers follow, and the functions of a chat. It needs only octile's own packages: tools use it, too."""

import json
from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TRIP: dict[str, Any] = {"type": "function", "function": {"name": "trip", "parameters": SCHEMA}}
STOP = {"type": "function", "function": {"name": "stop"}}
STRICT = {"type": "function", "function": {**TRIP["function"], "strict": True}}


def is_trip(text: str) -> bool:
    """Whether a text is JSON that follows `SCHEMA`."""
    trip = json.loads(text)
    return (
        set(trip) == {"city", "days"} and trip["city"] in SCHEMA["properties"]["city"]["enum"] and 0 < trip["days"] < 10
    )


def schema_format(schema: dict[str, Any] = SCHEMA) -> dict[str, Any]:
    """The `response_format` of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema, "strict": True}}
