"""OpenAI's fields `tools` and `tool_choice`, checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from ...limits import MAX_TOOL_SCHEMA_DEPTH, MAX_TOOL_SCHEMA_VALUES, MAX_TOOLS

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class ToolChoice(NamedTuple):
    """Which calls the model may make: none, any (`auto`), at least one (`required`), or one of this function."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None
    names: frozenset[str]  # of the tools that the model may call


def check_tools(tools: object, tool_choice: object) -> ToolChoice:
    """Both fields as JSON has them, None where the request has none. ValueError names the field that is wrong."""
    if tools is None:
        tools = []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise ValueError(f"tools must be a list of at most {MAX_TOOLS} tools, got {_got(tools)}")
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
    for field, kind, wanted in (("description", str, "text"), ("strict", bool, "true or false")):
        if not isinstance(function.get(field), kind | None):
            raise ValueError(f"{path}.{field} must be {wanted}, got {function[field]!r:.60}")
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
        if depth > MAX_TOOL_SCHEMA_DEPTH or values > MAX_TOOL_SCHEMA_VALUES:
            most = f"{MAX_TOOL_SCHEMA_VALUES} values, {MAX_TOOL_SCHEMA_DEPTH} deep"
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
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice, names)
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise ValueError(
            'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
            f'{{"type": "allowed_tools", "allowed_tools": {{"mode": ..., "tools": [...]}}}}, got {choice!r:.60}'
        )
    return ToolChoice("named", _named("tool_choice", choice, names), names)


def _allowed(choice: dict[str, Any], names: frozenset[str]) -> ToolChoice:
    """A choice of some of the tools: nested as in chat completions, or flat as in the Responses API."""
    path = "tool_choice"
    if "allowed_tools" in choice:
        path, choice = f"{path}.allowed_tools", choice["allowed_tools"]
        if not isinstance(choice, dict):
            raise ValueError(f"{path} must be an object, got {choice!r:.60}")
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise ValueError(f'{path}.mode must be "auto" or "required", got {mode!r:.60}')
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise ValueError(f"{path}.tools must be a list of 1 to {MAX_TOOLS} tools, got {_got(tools)}")
    some = set()
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise ValueError(f'{path}.tools[{i}] must be a tool of the type "function", got {tool!r:.60}')
        flat = "function" not in tool and "name" in tool
        some.add(_named(f"{path}.tools[{i}]", {"function": tool} if flat else tool, names))
    return ToolChoice(mode, None, frozenset(some))


def _named(path: str, choice: dict[str, Any], names: frozenset[str]) -> str:
    """The name of the function that a choice names, which must be one of `names`."""
    function = choice.get("function")
    if not isinstance(function, dict):
        raise ValueError(f"{path}.function must be an object, got {function!r:.60}")
    name = function.get("name")
    if not isinstance(name, str) or name not in names:
        raise ValueError(f"{path}.function.name must be that of one of the tools, got {name!r:.60}")
    return name


def _got(value: object) -> str:
    return f"{len(value)} of them" if isinstance(value, list) else f"{value!r:.60}"
