"""What a client of the Responses API sends: its fields, its items as messages of a chat, and which items are left out
with `truncation: "auto"`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from .. import limits
from ..errors import ApiError, bad, shown, unsupported
from ..generation import Prompt
from ..prompts import TextParts, kind_of, string_of, text_of
from .schemas import Count, Keyword, Name, ResponseFormat, Sampling, Text
from .unserved import RESPONSES, also_unserved

_LOGPROBS = "message.output_text.logprobs"
INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")  # the second changes nothing: reasoning is sent in the clear
_ROLES = ("user", "assistant", "system", "developer")
_PARTS = TextParts(
    dict.fromkeys(("input_text", "output_text", "reasoning_text", "text"), "text") | {"refusal": "refusal"}
)
_ANSWER_SHARE = 16  # the part of the context that is left for an answer of no given length, where items are left out

Item = Mapping[str, Any]
Items = Annotated[list[dict[str, Any]], Meta(max_length=limits.MAX_MESSAGES)]
Id = Annotated[str, Meta(max_length=limits.MAX_NAME_CHARACTERS)]
Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=limits.MAX_METADATA_KEY_CHARACTERS)],
        Annotated[str, Meta(max_length=limits.MAX_METADATA_CHARACTERS)],
    ],
    Meta(max_length=limits.MAX_METADATA),
]
Included = Annotated[
    list[Annotated[str, Meta(max_length=limits.MAX_INCLUDED_CHARACTERS)]], Meta(max_length=limits.MAX_INCLUDED)
]


class TextConfig(Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: Keyword | None = None


class ReasoningConfig(Struct, kw_only=True):
    effort: Keyword | None = None
    summary: Keyword | None = None


@also_unserved(RESPONSES)
class InputTokensRequest(Sampling, kw_only=True):
    """What makes a prompt, and what else a response takes, which changes no count."""

    input: Text | Items | None = None
    instructions: Text | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    max_output_tokens: Count | None = None
    top_logprobs: int | None = None
    include: Included | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[str, Meta(max_length=limits.MAX_TOOL_CHOICE_CHARACTERS)] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Metadata | None = None
    truncation: Keyword | None = None
    max_tool_calls: Count | None = None  # of tools that the server runs: there are none
    safety_identifier: Id | None = None
    user: Id | None = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    input: Text | Items


def check(request: InputTokensRequest) -> None:
    """ApiError for a value that would change the answer and is not served."""
    if request.truncation not in (None, "auto", "disabled"):
        raise unsupported("truncation", f'it must be "auto" or "disabled", got {shown(request.truncation)}')
    for name in request.include or ():
        if name not in INCLUDED:
            raise unsupported("include", f"it may have {' and '.join(INCLUDED)}, got {shown(name)}")
    if request.reasoning is not None and request.reasoning.summary not in (None, "auto"):
        raise unsupported("reasoning.summary", "reasoning is told as it is")


def format_of(request: InputTokensRequest) -> ResponseFormat | None:
    """`text.format` in the form of chat completions."""
    given = None if request.text is None else request.text.format
    if given is None:
        return None
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise unsupported("text.format.type", f"it must be text, json_object or json_schema, got {shown(kind)}")
    if kind == "json_schema" and not isinstance(given.get("schema"), dict):
        raise bad("text.format.schema", f"text.format.schema must be a JSON schema, got {shown(given.get('schema'))}")
    return ResponseFormat(type=kind, json_schema={"schema": given["schema"]} if kind == "json_schema" else None)


def logprobs_of(request: ResponsesRequest, most: int) -> int | None:
    """How many of the likeliest tokens are shown with each token; None: no log-probabilities."""
    top = request.top_logprobs or 0
    if not 0 <= top <= most:
        raise bad("top_logprobs", f"top_logprobs must be from 0 to {most}, got {shown(top)}")
    return top if top or _LOGPROBS in (request.include or ()) else None


# ---- items as messages


def item_messages(before: Sequence[Any], given: Sequence[Any]) -> list[dict[str, Any]]:
    """Items as messages of a chat: the model's texts and calls of one turn are one message, of however many items.
    `before`: items of the responses that this one follows; errors count the items that are `given`."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # call -> function
    for at, item in enumerate([*before, *given], -len(before)):
        path = f"input[{at}]"
        if not isinstance(item, Mapping):
            raise bad(path, f"{path} must be an object, got {shown(item)}")
        kind = kind_of(item) or "message"
        if kind == "message":
            _message(messages, item, path)
        elif kind == "reasoning":
            _reasoning(messages, item, path)
        elif kind == "function_call":
            _call(messages, names, item, path)
        elif kind == "function_call_output":
            call = string_of(item, "call_id", path)
            if call not in names:
                raise bad(
                    f"{path}.call_id", f"{path}.call_id must be that of a function_call before, got {shown(call)}"
                )
            output = text_of(item.get("output"), f"{path}.output", _PARTS)
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
    text = text_of(item.get("content"), f"{path}.content", _PARTS)
    if role != "assistant":
        messages.append({"role": role, "content": text})
        return
    last = _turn(messages)
    if last["content"] or "tool_calls" in last:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    last["content"] = text


def _reasoning(messages: list[dict[str, Any]], item: Mapping[str, Any], path: str) -> None:
    """Some templates show the reasoning of earlier turns to the model. An item without text, as other servers make it,
    is skipped."""
    if not item.get("content"):
        return
    last = _turn(messages)
    if last["content"] or "tool_calls" in last or "reasoning_content" in last:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    last["reasoning_content"] = text_of(item["content"], f"{path}.content", _PARTS)


def _call(messages: list[dict[str, Any]], names: dict[str, str], item: Mapping[str, Any], path: str) -> None:
    call, name = string_of(item, "call_id", path), string_of(item, "name", path)
    arguments = string_of(item, "arguments", path)
    if not is_json(arguments):
        raise bad(f"{path}.arguments", f"{path}.arguments must be JSON in a string, got {shown(arguments)}")
    names[call] = name
    calls = _turn(messages).setdefault("tool_calls", [])
    calls.append({"id": call, "type": "function", "function": {"name": name, "arguments": arguments}})


def is_json(arguments: str) -> bool:
    """Whether arguments are complete. Those of a call that was cut off are not."""
    try:
        msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the model's present turn."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def chat_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Tools in the form of chat completions, which templates show."""
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
    if kind == "allowed_tools":  # `check_tools` reads it as it is
        return choice
    if kind != "function":
        raise unsupported("tool_choice.type", f"it must be function or allowed_tools, got {shown(kind)}")
    return {"type": "function", "function": {"name": choice.get("name")}}


# ---- truncation


async def fitting(
    items: Sequence[Item], make: Callable[[Sequence[Item]], Awaitable[Prompt]], limit: int, answer: int | None
) -> Prompt:
    """The prompt that `make` makes of these items, or of as many of them as leave room for the answer.

    Whole turns are left out, the oldest first: a message of the user with all that came of it. Where that is not
    enough, the model's own steps since the last message of the user are left out too, each with what its calls
    returned. These stay: instructions, messages of the system and of developers, the last message of the user, and the
    end: the last item, or the last results with their calls. ApiError as `make` raises it, where these do not fit."""
    whole = await _made(make, items)
    if whole is not None and len(whole.ids) + (answer or 1) <= limit:
        return whole
    groups = _groups(items)
    room = limit - (answer or max(1, limit // _ANSWER_SHARE))
    least, most = 1, len(groups)
    best = None
    while least <= most:
        some = (least + most) // 2
        made = await _made(make, _without(items, groups[:some]))
        if made is not None and len(made.ids) <= room:
            best, most = made, some - 1
        else:
            least = some + 1
    return best or await make(_without(items, groups))


async def _made(make: Callable[[Sequence[Item]], Awaitable[Prompt]], items: Sequence[Item]) -> Prompt | None:
    """None if the prompt is far too long."""
    try:
        return await make(items)
    except ApiError as error:
        if error.code == "context_length_exceeded":
            return None
        raise


def _groups(items: Sequence[Item]) -> list[list[int]]:
    """The items that are left out together, the oldest first. Items that always stay are in no group."""
    question = max((at for at, item in enumerate(items) if _is_of(item, "user")), default=-1)
    stays = {question, *_end(items)}
    groups: list[list[int]] = []
    for at, item in enumerate(items):
        if at in stays or _is_of(item, "system", "developer"):
            continue
        step = at == question + 1 or (at > question and _is(items[at - 1], "function_call_output"))
        if not groups or _is_of(item, "user") or (step and not _is(item, "function_call_output")):
            groups.append([])
        groups[-1].append(at)
    return groups


def _end(items: Sequence[Item]) -> set[int]:
    """The last item, or the last results with the calls that they answer."""
    at = len(items)
    while at and _is(items[at - 1], "function_call_output"):
        at -= 1
    calls = {item["call_id"] for item in items[at:]}
    answered = {i for i, item in enumerate(items[:at]) if _is(item, "function_call") and item["call_id"] in calls}
    return answered | {*range(at, len(items))} or {len(items) - 1}


def _without(items: Sequence[Item], groups: Sequence[Sequence[int]]) -> list[Item]:
    """The items of no group, without results whose calls are left out."""
    gone = {at for group in groups for at in group}
    left: list[Item] = []
    calls = set()
    for at, item in enumerate(items):
        if at in gone or (_is(item, "function_call_output") and item["call_id"] not in calls):
            continue
        if _is(item, "function_call"):
            calls.add(item["call_id"])
        left.append(item)
    return left


def _is(item: Item, kind: str) -> bool:
    return (item.get("type") or "message") == kind


def _is_of(item: Item, *roles: str) -> bool:
    return _is(item, "message") and item.get("role") in roles
