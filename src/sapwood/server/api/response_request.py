"""What a client of the Responses API sends, field by field, and what of it this server does not have."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from ..errors import bad, shown, unsupported
from .schemas import Count, Name, ResponseFormat, Sampling, Text
from .unserved import RESPONSES, also_unserved

_LOGPROBS = "message.output_text.logprobs"
INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")  # the second changes nothing: reasoning is told in the clear


Items = Annotated[list[dict[str, Any]], Meta(max_length=4096)]


class TextConfig(Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: Annotated[str, Meta(max_length=32)] | None = None


class ReasoningConfig(Struct, kw_only=True):
    effort: Annotated[str, Meta(max_length=32)] | None = None
    summary: Annotated[str, Meta(max_length=32)] | None = None


@also_unserved(RESPONSES)
class InputTokensRequest(Sampling, kw_only=True):
    """What makes a prompt, and what else a response takes, which changes no count."""

    input: Text | Items | None = None
    instructions: Text | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    max_output_tokens: Count | None = None
    top_logprobs: int | None = None
    include: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=32)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[str, Meta(max_length=64)] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    truncation: Annotated[str, Meta(max_length=32)] | None = None
    max_tool_calls: Count | None = None  # of tools that a server runs: there are none here
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    input: Text | Items


def check(request: InputTokensRequest) -> None:
    """What would change the answer and is not there is refused by name."""
    if request.truncation not in (None, "auto", "disabled"):
        raise unsupported("truncation", f'it must be "auto" or "disabled", got {shown(request.truncation)}')
    for name in request.include or ():
        if name not in INCLUDED:
            raise unsupported("include", f"it may have {' and '.join(INCLUDED)}, got {shown(name)}")
    if request.reasoning is not None and request.reasoning.summary not in (None, "auto"):
        raise unsupported("reasoning.summary", "reasoning is told as it is")


def format_of(request: InputTokensRequest) -> ResponseFormat | None:
    """`text.format`, as chat completions have it."""
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
    """How many of the likeliest tokens are told with each; None: no log-probabilities."""
    top = request.top_logprobs or 0
    if not 0 <= top <= most:
        raise bad("top_logprobs", f"top_logprobs must be from 0 to {most}, got {shown(top)}")
    return top if top or _LOGPROBS in (request.include or ()) else None
