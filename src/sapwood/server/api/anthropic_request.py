"""What a client of Anthropic's Messages API sends: its fields, and its messages as messages of a chat: blocks of text,
thinking, calls of tools and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from sapwood.engine.params import MOST_STOPS

from ..errors import bad, shown, unsupported
from ..limits import MAX_CALLS, MAX_PARTS
from ..prompts import TextParts, kind_of, string_of, text_of
from .schemas import Count, Keyword, Messages, ResponseFormat, Sampling, Text, Word
from .unserved import MESSAGES, also_unserved

_ROLES = ("user", "assistant", "system")
_BLOCKS = TextParts({"text": "text"}, noun="text blocks", subject="it")


class Thinking(Struct, kw_only=True):
    """`budget_tokens` is taken and changes nothing: a model thinks as long as it does, within max_tokens."""

    type: Keyword
    budget_tokens: Count | None = None
    display: Keyword | None = None


class OutputConfig(Struct, kw_only=True):
    effort: Keyword | None = None
    format: dict[str, Any] | None = None
    task_budget: Any = None


@also_unserved(MESSAGES)
class CountRequest(Sampling, kw_only=True):
    """What makes a prompt."""

    messages: Messages
    system: Text | Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # as output_config.format was called before
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: Count
    stop_sequences: Annotated[list[Word], Meta(max_length=MOST_STOPS)] | None = None


def template_variables(request: CountRequest) -> dict[str, Any]:
    """What the chat template gets besides messages and tools."""
    variables = dict(request.chat_template_kwargs or {})
    thinking = request.thinking
    if thinking is not None:
        if thinking.type not in ("enabled", "adaptive", "disabled"):
            raise unsupported("thinking.type", f"it must be enabled, adaptive or disabled, got {shown(thinking.type)}")
        if thinking.display not in (None, "summarized"):
            raise unsupported("thinking.display", "thinking is told as it is")
        if thinking.type != "adaptive":
            variables.setdefault("enable_thinking", thinking.type == "enabled")
    if request.output_config is not None and request.output_config.effort is not None:
        variables.setdefault("reasoning_effort", request.output_config.effort)
    return variables


def format_of(request: CountRequest) -> ResponseFormat | None:
    """The demanded form of the answer, as chat completions have it."""
    given, field = request.output_format, "output_format"
    if request.output_config is not None:
        if request.output_config.task_budget is not None:
            raise unsupported("output_config.task_budget", "use max_tokens")
        if request.output_config.format is not None:
            if given is not None:
                raise bad(field, "give either output_config.format or output_format")
            given, field = request.output_config.format, "output_config.format"
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise unsupported(f"{field}.type", f"it must be json_schema, got {shown(given.get('type'))}")
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise bad(f"{field}.schema", f"{field}.schema must be a JSON schema, got {shown(schema)}")
    return ResponseFormat(type="json_schema", json_schema={"schema": schema})


# ---- blocks as messages


def chat_messages(system: Any, given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a chat. `cache_control` is ignored everywhere: the cache needs no marks."""
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": text_of(system, "system", _BLOCKS)})
    names: dict[str, str] = {}  # id of a tool_use -> its tool
    for at, message in enumerate(given):
        path, role = f"messages[{at}]", message.get("role")
        if role not in _ROLES:
            raise bad(f"{path}.role", f"{path}.role must be one of {', '.join(_ROLES)}, got {shown(role)}")
        content, path = message.get("content"), f"{path}.content"
        if role == "system" or isinstance(content, str):
            messages.append({"role": role, "content": text_of(content, path, _BLOCKS)})
        elif not isinstance(content, list) or not 0 < len(content) <= MAX_PARTS:
            raise bad(path, f"{path} must be text or a list of 1 to {MAX_PARTS} blocks, got {shown(content)}")
        elif role == "assistant":
            messages.append(_assistant_message(content, path, names))
        else:
            messages += _user_messages(content, path, names)
    return messages


def _assistant_message(content: Sequence[Any], path: str, names: dict[str, str]) -> dict[str, Any]:
    """The blocks of a turn of the model as one message."""
    texts, reasoning, calls = [], [], []
    for at, block in enumerate(content):
        where = f"{path}[{at}]"
        kind = kind_of(block)
        if kind == "text":
            texts.append(string_of(block, "text", where))
        elif kind == "thinking":
            reasoning.append(string_of(block, "thinking", where))
        elif kind == "tool_use":
            id, name, arguments = string_of(block, "id", where), string_of(block, "name", where), block.get("input")
            if not isinstance(arguments, dict):
                raise bad(f"{where}.input", f"{where}.input must be an object, got {shown(arguments)}")
            names[id] = name
            calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
        elif kind != "redacted_thinking":  # which no model here can read
            raise unsupported(f"{where}.type", f"it must be text, thinking or tool_use, got {shown(kind)}")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _user_messages(content: Sequence[Any], path: str, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Each result of a tool is a message; the texts between them are messages of the user."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for at, block in enumerate(content):
        where = f"{path}[{at}]"
        kind = kind_of(block)
        if kind == "text":
            texts.append(string_of(block, "text", where))
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
    id = string_of(block, "tool_use_id", where)
    if id not in names:
        raise bad(f"{where}.tool_use_id", f"{where}.tool_use_id must be the id of a tool_use before, got {shown(id)}")
    content = block.get("content")
    text = "" if content is None else text_of(content, f"{where}.content", _BLOCKS)
    if block.get("is_error"):
        text = f"Error: {text}"  # chat templates have no other way to show it
    return {"role": "tool", "tool_call_id": id, "name": names[id], "content": text}


def chat_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Tools in the form of chat completions, which templates show."""
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
    return 1 if one else MAX_CALLS
