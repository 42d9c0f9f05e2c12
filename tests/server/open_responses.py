"""What the Open Responses specification says of responses and of the events of a stream, as far as this server has
them: `check(events)` and `check_response(response)` raise msgspec.ValidationError where a field is missing or wrong.

A field with a default may be left out, and is never null unless its type says so; fields that nobody knows are allowed.
Reasoning comes in the events of OpenAI's API, `response.reasoning_text.*`: what the specification calls
`response.reasoning.*` is the same by another name, and OpenAI's clients do not know that one.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

Number = int | float
Status = Literal["in_progress", "completed", "incomplete"]


class TopLogProb(Struct):
    token: str
    logprob: Number
    bytes: list[int]


class LogProb(Struct):
    token: str
    logprob: Number
    bytes: list[int]
    top_logprobs: list[TopLogProb]


class OutputText(Struct, tag="output_text"):
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[LogProb] | UnsetType = UNSET


class InputText(Struct, tag="input_text"):
    text: str


class ReasoningText(Struct, tag="reasoning_text"):
    text: str


class SummaryText(Struct, tag="summary_text"):
    text: str


class Refusal(Struct, tag="refusal"):
    refusal: str


Part = OutputText | InputText | ReasoningText | SummaryText | Refusal


class Message(Struct, tag="message"):
    id: str
    status: Status
    role: Literal["user", "assistant", "system", "developer"]
    content: list[Part]


class FunctionCall(Struct, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class FunctionCallOutput(Struct, tag="function_call_output"):
    id: str
    call_id: str
    output: str | list[InputText]
    status: Status


class Reasoning(Struct, tag="reasoning"):
    id: str
    summary: list[SummaryText]
    content: list[Part] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET


Item = Message | FunctionCall | FunctionCallOutput | Reasoning


class Tool(Struct):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class Format(Struct):
    type: Literal["text", "json_object", "json_schema"]


class JsonSchemaFormat(Struct):
    type: Literal["json_schema"]
    name: str
    description: str | None
    schema: dict[str, Any]
    strict: bool


class Text(Struct):
    format: Format
    verbosity: Literal["low", "medium", "high"] | UnsetType = UNSET


class ReasoningSettings(Struct):
    effort: str | None
    summary: str | None


class InputDetails(Struct):
    cached_tokens: int


class OutputDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class Error(Struct):
    code: str
    message: str


class Incomplete(Struct):
    reason: str


class FunctionChoice(Struct, tag_field="type", tag="function"):
    name: str | UnsetType = UNSET


class AllowedChoice(Struct, tag_field="type", tag="allowed_tools"):
    tools: list[FunctionChoice]
    mode: Literal["none", "auto", "required"]


class Response(Struct):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: str
    incomplete_details: Incomplete | None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[Item]
    error: Error | None
    tools: list[Tool]
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice
    truncation: Literal["auto", "disabled"]
    parallel_tool_calls: bool
    text: Text
    top_p: Number
    presence_penalty: Number
    frequency_penalty: Number
    top_logprobs: int
    temperature: Number
    reasoning: ReasoningSettings | None
    user: str | None  # in the first edition
    usage: Usage | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: Any
    safety_identifier: str | None
    prompt_cache_key: str | None


class _Event(Struct):
    sequence_number: int


class OfResponse(_Event):
    response: Response


class OfItem(_Event):
    output_index: int
    item: Item | None


class OfPart(_Event):
    item_id: str
    output_index: int
    content_index: int
    part: Part


class OfText(_Event):
    item_id: str
    output_index: int
    content_index: int


class TextDelta(OfText):
    delta: str
    logprobs: list[LogProb] | UnsetType = UNSET


class TextDone(OfText):
    text: str
    logprobs: list[LogProb] | UnsetType = UNSET


class ArgumentsDelta(_Event):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(_Event):
    item_id: str
    output_index: int
    arguments: str


EVENTS: dict[str, type[Struct]] = {
    **dict.fromkeys(("created", "in_progress", "completed", "failed", "incomplete"), OfResponse),
    **dict.fromkeys(("output_item.added", "output_item.done"), OfItem),
    **dict.fromkeys(("content_part.added", "content_part.done"), OfPart),
    **dict.fromkeys(("output_text.delta", "reasoning_text.delta"), TextDelta),
    **dict.fromkeys(("output_text.done", "reasoning_text.done"), TextDone),
    "function_call_arguments.delta": ArgumentsDelta,
    "function_call_arguments.done": ArgumentsDone,
}


def check_response(response: dict[str, Any]) -> Response:
    form = response["text"]["format"]
    if form["type"] == "json_schema":
        msgspec.convert(form, JsonSchemaFormat)
    return msgspec.convert(response, Response)


def check(events: list[tuple[str, Any]]) -> Response:
    """The events of a stream, by name and data -> the response that ends it."""
    for name, data in events:
        assert name == data["type"], "the event's name is its type"
        msgspec.convert(data, EVENTS[name.removeprefix("response.")])
        if "response" in data:
            last = check_response(data["response"])
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    return last


def check_items(items: list[dict[str, Any]]) -> list[Item]:
    return msgspec.convert(items, list[Item])
