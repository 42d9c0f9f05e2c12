"""Calls that a request demands: the schema that holds the model to them, and the parser of what it writes then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .base import BaseParser
from .deltas import MOST_CALLS
from .json_text import SPACES, JsonText

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords of a schema whose values are schemas by name, and those whose values are plain data.
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_DATA = {"const", "enum", "default", "examples"}


def forced_schema(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any], most: int = MOST_CALLS
) -> dict[str, Any]:
    """The JSON schema of the whole text, for tools and a choice that `check_tools` has seen.

    One function is named: its parameters. "required": an array of at least one `{"name": ..., "parameters": {...}}`,
    and of `most` of them. There the schema of each tool lies under `$defs`, and its references into itself point there:
    definitions of the same name in two tools stay apart.
    """
    functions = functions_of(tools)
    if isinstance(choice, Mapping):
        return functions[choice["function"]["name"]]
    places = {name: f"tool{i}" for i, name in enumerate(functions)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, place in places.items()
    ]
    return {
        "type": "array",
        "minItems": 1,
        "maxItems": most,
        "items": {"anyOf": calls},
        "$defs": {place: moved(functions[name], f"#/$defs/{place}") for name, place in places.items()},
    }


def functions_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By its name, the schema of each function's arguments."""
    return {tool["function"]["name"]: _parameters(tool["function"]) for tool in tools}


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments: of an object, whatever else it says."""
    given = function.get("parameters")
    if given is None:
        return dict(_NO_PARAMETERS)
    return {"type": "object", **{key: value for key, value in given.items() if key not in ("$schema", "$id")}}


def moved(schema: Any, root: str) -> Any:
    """A schema, with references to its own root pointing to where the root is now."""
    if isinstance(schema, list):
        return [moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            value = root + value[1:]
        elif key in _BY_NAME and isinstance(value, dict):
            value = {name: moved(below, root) for name, below in value.items()}
        elif key not in _DATA:
            value = moved(value, root)
        made[key] = value
    return made


class ForcedParser(BaseParser):
    """Text as `forced_schema` has it: the arguments of the function `name`, or, if that is None, an array of calls.
    Where the text is something else, because no grammar held it, that is content."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self._name = name
        self._state = self._opened

    def _opened(self, text: str, at: int) -> int:
        if self._name is None:
            return super()._opened(text, at)
        if text[at] in SPACES:
            self._held.append(text[at])
            return at + 1
        if text[at] == "{":
            self._begin(self._name)
            self._json = JsonText()
            self._state = self._in_arguments
        else:
            self._fail()
        return at

    def _outside(self, text: str, at: int) -> int:
        return self._plain(text, at)
