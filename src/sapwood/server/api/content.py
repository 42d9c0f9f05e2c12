"""Messages of a conversation as chat templates want them: content as text, tool calls with arguments as objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..errors import bad, shown, unsupported

_MOST_ROLE = 64  # characters
_MOST_PARTS = 4096


def message_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages. What is no text is refused by the place where it stands; of roles the chat template knows
    which there are."""
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= _MOST_ROLE:
        raise bad(f"{where}.role", f"{where}.role must be text of 1 to {_MOST_ROLE} characters, got {shown(role)}")
    made = {name: value for name, value in message.items() if value is not None}
    made["content"] = _text(message.get("content"), f"{where}.content")
    if made["content"] is None:
        if role != "assistant":
            raise bad(f"{where}.content", f"{where}.content is missing")
        made["content"] = ""
    calls = message.get("tool_calls")
    if calls:
        made["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    elif "tool_calls" in made:
        del made["tool_calls"]
    return made


def _text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or len(content) > _MOST_PARTS:
        raise bad(where, f"{where} must be text or a list of at most {_MOST_PARTS} parts, got {shown(content)}")
    texts = []
    for at, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal":
            text = part.get("refusal")
        elif kind in ("text", "input_text", "output_text"):
            text = part.get("text")
        else:
            raise unsupported(f"{where}[{at}].type", f"content must be text, got {shown(kind)}")
        if not isinstance(text, str):
            raise bad(f"{where}[{at}].text", f"{where}[{at}].text must be text, got {shown(text)}")
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Arguments travel as JSON in a string; templates write them down as objects."""
    if not isinstance(calls, list) or len(calls) > 128:
        raise bad(where, f"{where} must be a list of at most 128 calls")
    made = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise bad(f"{where}[{at}].function", f"{where}[{at}].function must have a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
            except (msgspec.DecodeError, RecursionError):
                raise bad(
                    f"{where}[{at}].function.arguments", f"{where}[{at}].function.arguments must be JSON in a string"
                ) from None
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made
