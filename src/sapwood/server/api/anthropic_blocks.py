"""Anthropic's messages as messages of a chat: blocks of text, thinking, tools used and what they returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import bad, shown, unsupported
from ..text.tools import MOST_CALLS

MOST_BLOCKS = 4096
_ROLES = ("user", "assistant", "system")


def chat_messages(system: Any, given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`cache_control` stands where it likes: the cache needs no marks."""
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": _texts(system, "system")})
    names: dict[str, str] = {}  # tool_use -> tool
    for at, message in enumerate(given):
        path, role = f"messages[{at}]", message.get("role")
        if role not in _ROLES:
            raise bad(f"{path}.role", f"{path}.role must be one of {', '.join(_ROLES)}, got {shown(role)}")
        content, path = message.get("content"), f"{path}.content"
        if role == "system" or isinstance(content, str):
            messages.append({"role": role, "content": _texts(content, path)})
        elif not isinstance(content, list) or not 0 < len(content) <= MOST_BLOCKS:
            raise bad(path, f"{path} must be text or a list of 1 to {MOST_BLOCKS} blocks, got {shown(content)}")
        elif role == "assistant":
            messages.append(_said(content, path, names))
        else:
            messages += _asked(content, path, names)
    return messages


def _said(content: Sequence[Any], path: str, names: dict[str, str]) -> dict[str, Any]:
    """The model's own turn is one message."""
    texts, thoughts, calls = [], [], []
    for at, block in enumerate(content):
        where = f"{path}[{at}]"
        kind = _kind(block)
        if kind == "text":
            texts.append(_string(block, "text", where))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", where))
        elif kind == "tool_use":
            id, name, arguments = _string(block, "id", where), _string(block, "name", where), block.get("input")
            if not isinstance(arguments, dict):
                raise bad(f"{where}.input", f"{where}.input must be an object, got {shown(arguments)}")
            names[id] = name
            calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
        elif kind != "redacted_thinking":  # which nobody here can read
            raise unsupported(f"{where}.type", f"it must be text, thinking or tool_use, got {shown(kind)}")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _asked(content: Sequence[Any], path: str, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """What tools returned is a message for each; text around it is the user's."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for at, block in enumerate(content):
        where = f"{path}[{at}]"
        kind = _kind(block)
        if kind == "text":
            texts.append(_string(block, "text", where))
        elif kind == "tool_result":
            if texts:
                messages.append({"role": "user", "content": "\n".join(texts)})
                texts = []
            messages.append(_result(block, where, names))
        else:
            raise unsupported(f"{where}.type", f"it must be text or tool_result, got {shown(kind)}")
    if texts:
        messages.append({"role": "user", "content": "\n".join(texts)})
    return messages


def _result(block: Mapping[str, Any], where: str, names: Mapping[str, str]) -> dict[str, Any]:
    id = _string(block, "tool_use_id", where)
    if id not in names:
        raise bad(f"{where}.tool_use_id", f"{where}.tool_use_id must be the id of a tool_use before, got {shown(id)}")
    content = block.get("content")
    text = "" if content is None else _texts(content, f"{where}.content")
    if block.get("is_error"):
        text = f"Error: {text}"  # chat templates have no other way to say so
    return {"role": "tool", "tool_call_id": id, "name": names[id], "content": text}


def _texts(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or len(content) > MOST_BLOCKS:
        raise bad(path, f"{path} must be text or a list of at most {MOST_BLOCKS} text blocks, got {shown(content)}")
    texts = []
    for at, block in enumerate(content):
        kind = _kind(block)
        if kind != "text":
            raise unsupported(f"{path}[{at}].type", f"it must be text, got {shown(kind)}")
        texts.append(_string(block, "text", f"{path}[{at}]"))
    return "\n".join(texts)


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _string(block: Mapping[str, Any], field: str, where: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise bad(f"{where}.{field}", f"{where}.{field} must be text, got {shown(value)}")
    return value


def chat_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Tools as chat completions have them, which is how templates show them."""
    if tools is None:
        return None
    made = []
    for at, tool in enumerate(tools):
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise unsupported(f"tools[{at}].type", f"it must be custom, got {shown(kind)}")
        fields = (("name", "name"), ("description", "description"), ("input_schema", "parameters"))
        function = {ours: tool[theirs] for theirs, ours in fields if tool.get(theirs) is not None}
        made.append({"type": "function", "function": function})
    return made


def chat_choice(choice: Mapping[str, Any] | None) -> Any:
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in ("auto", "any", "none"):
        raise bad("tool_choice.type", f"tool_choice.type must be auto, any, tool or none, got {shown(kind)}")
    return "required" if kind == "any" else kind


def most_calls(choice: Mapping[str, Any] | None) -> int:
    """How many calls an answer may have."""
    one = None if choice is None else choice.get("disable_parallel_tool_use")
    if not isinstance(one, bool | None):
        field = "tool_choice.disable_parallel_tool_use"
        raise bad(field, f"{field} must be true or false, got {shown(one)}")
    return 1 if one else MOST_CALLS
