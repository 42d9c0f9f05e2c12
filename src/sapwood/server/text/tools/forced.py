"""Calls that a request demands: grammars that hold the model to them, and the parser of what it writes then.

As JSON:                    `forced_schema`, `ForcedParser`
In the model's own form:    `written_grammar`, in Lark for llguidance; the format's own parser reads it
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...limits import MAX_CALL_NAME_CHARACTERS, MAX_CALLS
from ...process.grammar_trial import SPACES as GRAMMAR_SPACES
from .base import BaseParser
from .json_text import SPACES, JsonText
from .typed import Parameters, kinds_of

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords of a schema whose values are schemas by name, and those whose values are plain data.
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_DATA = {"const", "enum", "default", "examples"}


# ---- as JSON


def forced_schema(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any], most: int = MAX_CALLS
) -> dict[str, Any]:
    """The JSON schema of the whole text, for tools and a choice that `check_tools` has seen.

    For a named function: its parameters. For "required": an array of 1 to `most` calls, each
    `{"name": ..., "parameters": {...}}`. There the schema of each tool lies under `$defs`, and its references into
    itself point there: definitions of the same name in two tools stay apart.
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
    """Name of a function -> the schema of its arguments."""
    return {tool["function"]["name"]: _parameters(tool["function"]) for tool in tools}


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments. It describes an object, whatever else it says."""
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
    Any other text, which no grammar held to the form, is content."""

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


# ---- in the model's own form

_LINE = "\n"
_KEY = re.compile(r"[^<>\s](?:[^<>\n]*[^<>\s])?")
# Keywords that a schema may have at its root, where its arguments are written one by one.
_ROOT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description"}


class _Tags(NamedTuple):
    """The texts around a call, around the name of its function, and around the key and the value of an argument."""

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


def written_grammar(form: str, functions: Mapping[str, Parameters], most: int = MAX_CALLS) -> str | None:
    """A grammar in Lark for 1 to `most` calls of these functions. None where models of this form are held to JSON, or
    where the form cannot say what the schemas demand."""
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
    """Arguments in the order of the schema. A text may be any, of any length: since only a tag marks the end of a text,
    a schema's pattern and length of texts are not enforced."""
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
    """Whether the schema demands no more than arguments that are written one by one can say."""
    properties, required = parameters.get("properties") or {}, parameters.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list) or not set(parameters) <= _ROOT:
        return False
    keys = (*properties, *required)
    return all(isinstance(key, str) and len(key) <= MAX_CALL_NAME_CHARACTERS and _KEY.fullmatch(key) for key in keys)


def _value(tags: _Tags, parameters: Parameters, key: str) -> str:
    """The rule of a value, with the tag that ends it."""
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
    return "%json " + _escaped(json.dumps({**schema, "x-guidance": GRAMMAR_SPACES}))


def _literal(*texts: str) -> str:
    return _escaped(json.dumps("".join(texts)))


def _escaped(text: str) -> str:
    """JSON without the characters that grammars of clients may not have (process/grammar_trial.py)."""
    return text.replace("&", "\\u0026").replace("~", "\\u007e")
