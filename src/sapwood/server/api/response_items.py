"""The Responses API's items as messages of a chat: what was said, functions called and what they returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..errors import bad, shown, unsupported

MOST_PARTS = 4096
_ROLES = ("user", "assistant", "system", "developer")


def item_messages(before: Sequence[Any], given: Sequence[Any]) -> list[dict[str, Any]]:
    """What a model says and calls in one turn is one message, however many items it is. `before`: items of responses
    that this one follows; errors count those that are `given`."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # call -> function
    for at, item in enumerate([*before, *given], -len(before)):
        path = f"input[{at}]"
        if not isinstance(item, Mapping):
            raise bad(path, f"{path} must be an object, got {shown(item)}")
        kind = item.get("type") or "message"
        if kind == "message":
            _message(messages, item, path)
        elif kind == "reasoning":
            _reasoning(messages, item, path)
        elif kind == "function_call":
            _call(messages, names, item, path)
        elif kind == "function_call_output":
            call = _string(item, "call_id", path)
            if call not in names:
                raise bad(
                    f"{path}.call_id", f"{path}.call_id must be that of a function_call before, got {shown(call)}"
                )
            output = _text(item.get("output"), f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": call, "name": names[call], "content": output})
        else:
            raise unsupported(
                f"{path}.type",
                f"it must be message, reasoning, function_call or function_call_output, got {shown(kind)}",
            )
    return messages


def _message(messages: list[dict[str, Any]], item: Mapping[str, Any], path: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise bad(f"{path}.role", f"{path}.role must be one of {', '.join(_ROLES)}, got {shown(role)}")
    text = _text(item.get("content"), f"{path}.content")
    if role != "assistant":
        messages.append({"role": role, "content": text})
        return
    last = _turn(messages)
    if last["content"] or "tool_calls" in last:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    last["content"] = text


def _reasoning(messages: list[dict[str, Any]], item: Mapping[str, Any], path: str) -> None:
    """For templates that show it to the model again. Without text, as other servers make it, it says nothing here."""
    if not item.get("content"):
        return
    last = _turn(messages)
    if last["content"] or "tool_calls" in last or "reasoning_content" in last:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    last["reasoning_content"] = _text(item["content"], f"{path}.content")


def _call(messages: list[dict[str, Any]], names: dict[str, str], item: Mapping[str, Any], path: str) -> None:
    call, name = _string(item, "call_id", path), _string(item, "name", path)
    arguments = _string(item, "arguments", path)
    if not is_json(arguments):
        raise bad(f"{path}.arguments", f"{path}.arguments must be JSON in a string, got {shown(arguments)}")
    names[call] = name
    calls = _turn(messages).setdefault("tool_calls", [])
    calls.append({"id": call, "type": "function", "function": {"name": name, "arguments": arguments}})


def is_json(arguments: str) -> bool:
    """Whether these are whole. Those of a call that was cut off are not."""
    try:
        msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's message that goes on."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _string(item: Mapping[str, Any], field: str, path: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise bad(f"{path}.{field}", f"{path}.{field} must be text, got {shown(value)}")
    return value


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or len(content) > MOST_PARTS:
        raise bad(path, f"{path} must be text or a list of at most {MOST_PARTS} parts, got {shown(content)}")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind not in (
            "input_text",
            "output_text",
            "reasoning_text",
            "text",
            "refusal",
        ):
            raise unsupported(f"{path}[{at}].type", f"content must be text, got {shown(kind)}")
        texts.append(_string(part, "refusal" if kind == "refusal" else "text", f"{path}[{at}]"))
    return "\n".join(texts)


def chat_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Tools as chat completions have them, which is how templates show them."""
    if tools is None:
        return None
    made = []
    for at, tool in enumerate(tools):
        kind = tool.get("type")
        if kind != "function":
            raise unsupported(f"tools[{at}].type", f"it must be function, got {shown(kind)}")
        fields = ("name", "description", "parameters", "strict")
        made.append({"type": kind, "function": {key: tool[key] for key in fields if tool.get(key) is not None}})
    return made


def chat_choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":  # read as it is
        return choice
    if kind != "function":
        raise unsupported("tool_choice.type", f"it must be function or allowed_tools, got {shown(kind)}")
    return {"type": "function", "function": {"name": choice.get("name")}}
