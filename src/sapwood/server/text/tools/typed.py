"""Arguments that a model writes as plain text, between tags: what they are in JSON, by the schema of the parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from .json_text import JsonText

_MOST_SCHEMAS = 200  # of one argument that are looked at: they may refer to each other in a circle
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)(\.0+)?")
_BOOLEANS, _NULLS = ("true", "false"), ("null", "none")  # some templates show them to models as Python writes them
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object"}

Parameters = Mapping[str, Any]  # a JSON schema


def kinds_of(parameters: Parameters, name: str) -> tuple[str, ...]:
    """The JSON types that an argument may have, in the order of its schema; none if that says nothing of them."""
    properties = parameters.get("properties")
    known = isinstance(properties, Mapping) and name in properties
    schemas = [properties[name] if known and properties else parameters.get("additionalProperties")]
    found: dict[str, None] = {}
    looked = 0
    while schemas and looked < _MOST_SCHEMAS:
        looked += 1
        schema = schemas.pop()
        if not isinstance(schema, Mapping):
            continue
        found.update(dict.fromkeys(_said(schema)))
        reference = schema.get("$ref")
        if isinstance(reference, str):
            schemas.append(_referred(parameters, reference))
        for word in ("allOf", "oneOf", "anyOf"):
            options = schema.get(word)
            if isinstance(options, list):
                schemas += reversed(options)
    return tuple(found)


def _said(schema: Parameters) -> list[str]:
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
    """A value as JSON. What is none of its types is text: whoever called knows best what was meant."""
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
    """JSON of a text. Those of its pieces, without their quotes, make that of all of it."""
    return msgspec.json.encode(text).decode()


def _is_json(text: str) -> bool:
    value = JsonText()
    return value.take(text + " ", 0) == len(text) and value.over
