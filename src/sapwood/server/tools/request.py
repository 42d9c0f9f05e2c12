"""What a request says of tools: OpenAI's fields `tools` and `tool_choice`, checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

MOST_TOOLS = 128
MOST_SCHEMA_DEPTH = 64
MOST_SCHEMA_VALUES = 20_000
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class ToolChoice(NamedTuple):
    """What the model may do: call nothing, what it likes (`auto`), at least one function, or the one of this name."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None
    names: frozenset[str]  # of all tools


def check_tools(tools: object, tool_choice: object) -> ToolChoice:
    """Both fields as JSON has them, None where the request has none. ValueError names the field that is wrong."""
    if tools is None:
        tools = []
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise ValueError(f"tools must be a list of at most {MOST_TOOLS} tools, got {_said(tools)}")
    names: dict[str, int] = {}
    for i, tool in enumerate(tools):
        name = _tool(f"tools[{i}]", tool)
        if name in names:
            raise ValueError(f"tools[{i}].function.name must be unique, got {name!r:.60} of tools[{names[name]}] again")
        names[name] = i
    return _choice(tool_choice, frozenset(names))


def _tool(path: str, tool: object) -> str:
    """The name of one tool."""
    if not isinstance(tool, dict):
        raise ValueError(f"{path} must be an object, got {tool!r:.60}")
    if tool.get("type") != "function":
        raise ValueError(f'{path}.type must be "function", got {tool.get("type")!r:.60}')
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ValueError(f"{path}.function must be an object, got {function!r:.60}")
    path += ".function"
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{path}.name must be 1 to 64 letters, digits, '_', '.' or '-', got {name!r:.60}")
    for field, kind, what in (("description", str, "text"), ("strict", bool, "true or false")):
        if not isinstance(function.get(field), kind | None):
            raise ValueError(f"{path}.{field} must be {what}, got {function[field]!r:.60}")
    _schema(f"{path}.parameters", function.get("parameters"))
    return name


def _schema(path: str, schema: object) -> None:
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{path} must be a JSON schema, an object, got {schema!r:.60}")
    if schema.get("type", "object") != "object":
        raise ValueError(f'{path}.type must be "object", got {schema["type"]!r:.60}')
    level: Sequence[Any] = [schema]
    values = depth = 0
    while level:
        depth, values = depth + 1, values + len(level)
        if depth > MOST_SCHEMA_DEPTH or values > MOST_SCHEMA_VALUES:
            most = f"{MOST_SCHEMA_VALUES} values, {MOST_SCHEMA_DEPTH} deep"
            raise ValueError(f"{path} must have at most {most}, got more")
        level = [
            below
            for value in level
            if isinstance(value, dict | list)
            for below in (value.values() if isinstance(value, dict) else value)
        ]


def _choice(choice: object, names: frozenset[str]) -> ToolChoice:
    if choice is None:
        choice = "auto" if names else "none"
    if choice == "none":
        return ToolChoice("none", None, names)
    if choice == "auto":
        return ToolChoice("auto" if names else "none", None, names)
    if choice == "required":
        if not names:
            raise ValueError('tool_choice "required" needs tools, got none')
        return ToolChoice("required", None, names)
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise ValueError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}, '
            f"got {choice!r:.60}"
        )
    function = choice.get("function")
    if not isinstance(function, dict):
        raise ValueError(f"tool_choice.function must be an object, got {function!r:.60}")
    name = function.get("name")
    if not isinstance(name, str) or name not in names:
        raise ValueError(f"tool_choice.function.name must be that of one of the tools, got {name!r:.60}")
    return ToolChoice("named", name, names)


def _said(value: object) -> str:
    return f"{len(value)} of them" if isinstance(value, list) else f"{value!r:.60}"
