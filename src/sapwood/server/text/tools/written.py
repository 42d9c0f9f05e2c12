"""Calls that a request demands, in the form in which the model writes them: grammars for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...process.grammar_trial import SPACES
from .call_object import MOST_NAME
from .deltas import MOST_CALLS
from .forced import moved
from .typed import Parameters, kinds_of

_LINE = "\n"
_KEY = re.compile(r"[^<>\s](?:[^<>\n]*[^<>\s])?")
# What a schema may say of its root, where its arguments are written one by one.
_ROOT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description"}


class _Tags(NamedTuple):
    """What stands around the name of a function, around the key and the value of each argument, and the whole call."""

    opening: str
    behind_name: str
    before_key: str
    behind_key: str
    line: str  # before the tag that ends a value
    value_closing: str
    closing: str


_TAGS = {
    "qwen3_coder": _Tags(
        *("<tool_call>\n<function=", ">\n"),
        *("<parameter=", ">\n", "\n", "</parameter>"),
        "</function>\n</tool_call>",
    ),
    "glm45": _Tags(
        *("<tool_call>", "\n"),
        *("<arg_key>", "</arg_key>\n<arg_value>", "", "</arg_value>"),
        "</tool_call>",
    ),
}


def written_grammar(form: str, functions: Mapping[str, Parameters], most: int = MOST_CALLS) -> str | None:
    """In Lark: at least one call of these functions, at most so many. None where this form is held as JSON, or cannot
    say what the schemas demand."""
    if form == "granite4":
        rules = [f"call: {_literal('<tool_call>', _LINE)} ({_objects(functions)}) {_literal(_LINE, '</tool_call>')}"]
    elif form in _TAGS and all(map(_plain, functions.values())):
        rules = _tagged(_TAGS[form], functions)
    else:
        return None
    more = f" ({_literal(_LINE)} call){{0,{most - 1}}}" if most > 1 else ""
    return "\n".join([f"start: call{more}", *rules])


def _objects(functions: Mapping[str, Parameters]) -> str:
    place = "#/$defs/arguments"
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": place}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
            "$defs": {"arguments": moved(given, place)},
        }
        for name, given in functions.items()
    ]
    return " | ".join(map(_json, calls))


def _tagged(tags: _Tags, functions: Mapping[str, Parameters]) -> list[str]:
    """Arguments in the order of the schema. A text may be any, however long: what else a schema says of texts (a
    pattern, a length) is not held where nothing marks their end but a tag."""
    named = " | ".join(f"f{at}" for at in range(len(functions)))
    rules = [
        f"call: {_literal(tags.opening)} ({named}) {_literal(tags.closing)}",
        f"text[suffix={_literal(tags.value_closing)}]: /(?s:.*)/",
        "KEY: /[A-Za-z_][A-Za-z0-9_-]{0,63}/",
    ]
    for at, (name, given) in enumerate(functions.items()):
        parts = [_literal(name, tags.behind_name)]
        properties, required = given.get("properties") or {}, given.get("required") or ()
        for key in (*properties, *(key for key in required if key not in properties)):
            argument = f"{_literal(tags.before_key, key, tags.behind_key)} {_value(tags, given, key)}"
            parts.append(f"({argument})" if key in required else f"({argument})?")
        if not properties and given.get("additionalProperties") is not False:
            parts.append(f"({_literal(tags.before_key)} KEY {_literal(tags.behind_key)} text {_literal(_LINE)})*")
        rules.append(f"f{at}: {' '.join(parts)}")
    return rules


def _plain(parameters: Parameters) -> bool:
    """Whether arguments written one by one are all that the schema demands."""
    properties, required = parameters.get("properties") or {}, parameters.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list) or not set(parameters) <= _ROOT:
        return False
    keys = (*properties, *required)
    return all(isinstance(key, str) and len(key) <= MOST_NAME and _KEY.fullmatch(key) for key in keys)


def _value(tags: _Tags, parameters: Parameters, key: str) -> str:
    """A value with the tag that ends it."""
    schema = (parameters.get("properties") or {}).get(key, True)
    kinds, end = kinds_of(parameters, key), _literal(tags.line, tags.value_closing, _LINE)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, dict) else None
    if "string" in kinds and isinstance(values, list) and values:
        written = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return f"({' | '.join(map(_literal, written))}) {end}"
    if not kinds or "string" in kinds:
        return f"text {_literal(_LINE)}"
    if '"$ref"' in json.dumps(schema):
        root, name = "#/$defs/parameters", key.replace("~", "~0").replace("/", "~1")
        schema = {"$ref": f"{root}/properties/{name}", "$defs": {"parameters": moved(parameters, root)}}
    return f"{_json(schema)} {end}"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + _escaped(json.dumps({**schema, "x-guidance": SPACES}))


def _literal(*texts: str) -> str:
    return _escaped(json.dumps("".join(texts)))


def _escaped(text: str) -> str:
    """JSON without what grammars of strangers may not have: `grammar_trial` says what."""
    return text.replace("&", "\\u0026").replace("~", "\\u007e")
