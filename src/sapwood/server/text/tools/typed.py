"""Arguments that a model writes as plain text between tags, as JSON: their types follow from the schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ...limits import MAX_ARGUMENT_SCHEMAS
from .json_text import JsonText

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)(\.0+)?")
_BOOLEANS, _NULLS = ("true", "false"), ("null", "none")  # some templates show them to models as Python writes them
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object"}

Parameters = Mapping[str, Any]  # a JSON schema


def kinds_of(parameters: Parameters, name: str) -> tuple[str, ...]:
    """The JSON types that an argument may have, in the order of its schema; () if the schema names none."""
    properties = parameters.get("properties")
    known = isinstance(properties, Mapping) and name in properties
    schemas = [properties[name] if known and properties else parameters.get("additionalProperties")]
    found: dict[str, None] = {}
    looked = 0
    while schemas and looked < MAX_ARGUMENT_SCHEMAS:
        looked += 1
        schema = schemas.pop()
        if not isinstance(schema, Mapping):
            continue
        found.update(dict.fromkeys(_types_of(schema)))
        reference = schema.get("$ref")
        if isinstance(reference, str):
            schemas.append(_referred(parameters, reference))
        for word in ("allOf", "oneOf", "anyOf"):
            options = schema.get(word)
            if isinstance(options, list):
                schemas += reversed(options)
    return tuple(found)


def _types_of(schema: Parameters) -> list[str]:
    """The types that this schema names itself."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return [kind]
    if isinstance(kind, list):
        return [each for each in kind if isinstance(each, str)]
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [*values, schema["const"]] if "const" in schema else values
    return [_NAMES.get(type(value), "array") for value in values]


def _referred(root: Parameters, reference: str) -> Any:
    if not reference.startswith("#"):
        return None
    place: Any = root
    for part in reference.split("/")[1:]:
        place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def json_of(text: str, kinds: tuple[str, ...]) -> str:
    """A value as JSON. A value that has none of its types is text: the client knows best what was meant."""
    value = text.strip()
    if not kinds:
        return value if _is_json(value) else quoted(text)
    if "null" in kinds and value.lower() in _NULLS:
        return "null"
    for kind in kinds:
        if kind == "string":
            return quoted(text)
        if kind == "boolean" and value.lower() in _BOOLEANS:
            return value.lower()
        if kind == "integer" and _INTEGER.fullmatch(value):
            return value
        if kind == "number" and value[:1] in "-0123456789" and _is_json(value):
            return value
        if kind in ("object", "array") and value[:1] == ("{" if kind == "object" else "[") and _is_json(value):
            return value
    return quoted(text)


def quoted(text: str) -> str:
    """The JSON of a text. The JSON of its pieces, without quotes and joined, is the same."""
    return msgspec.json.encode(text).decode()


def _is_json(text: str) -> bool:
    value = JsonText()
    return value.take(text + " ", 0) == len(text) and value.over
