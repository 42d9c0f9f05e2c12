"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from msgspec import Struct

from ..errors import ApiError, bad
from ..frontend import Serving
from ..generation import Generation, Prompt, TextPiece
from ..http import Call, named_event
from ..text.answer_parts import Tools, read_tools
from .answer_fields import cache_reports, written_to_cache
from .anthropic_request import (
    CountRequest,
    MessagesRequest,
    chat_choice,
    chat_messages,
    chat_tools,
    format_of,
    most_calls,
    template_variables,
)
from .blocks import Block, BlockClosed, BlockEvent, BlockOpened, Blocks
from .conversation import answer_parser, begin, in_words_of, prompt_of, respond
from .schemas import parse

_WORDS = {
    r"\bresponse_format\b": "output_config.format",
    r"^stop\b": "stop_sequences",
    r"\.function\.parameters\b": ".input_schema",
    r"\.function\b": "",
    r"^prompt\b": "messages",
}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: ApiError) -> bytes:
    """An error in the form that Anthropic's clients read."""
    return msgspec.json.encode(_error(error))


def _error(error: ApiError) -> dict[str, Any]:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


async def messages(serving: Serving, call: Call) -> Generation:
    request = parse(await call.body(), MessagesRequest)
    model = serving.models.find(request.model)
    with in_words_of(_WORDS):
        prompt, tools = await _prompt(serving, request)
        request.stop = request.stop_sequences
        tokens: int | None = request.max_tokens
        if tokens and len(prompt.ids) + tokens > serving.prompts.limit:
            tokens = None  # the stop_reason says that the context has ended sooner
        generation = await begin(serving, call, request, model, [prompt], tools, max_tokens=tokens, logprobs=None)
    return await respond(serving, call, request, generation, MessagesWriter(serving, request, generation, tools))


async def count_tokens(serving: Serving, call: Call) -> None:
    request = parse(await call.body(), CountRequest)
    serving.models.find(request.model)
    with in_words_of(_WORDS):
        prompt, _ = await _prompt(serving, request)
    await call.json({"input_tokens": len(prompt.ids)})


async def _prompt(serving: Serving, request: CountRequest) -> tuple[Prompt, Tools]:
    request.response_format = format_of(request)
    choice, most = chat_choice(request.tool_choice), most_calls(request.tool_choice)
    tools = read_tools(chat_tools(request.tools), choice, serving.tool_parser, most)
    made = chat_messages(request.system, request.messages)
    last = made[-1]
    continues = last["role"] == "assistant"
    if continues and ("tool_calls" in last or not last["content"].strip()):
        path = f"messages[{len(request.messages) - 1}].content"
        raise bad(path, f"{path} must be text for the answer to go on from, or a message of the user must follow")
    variables = template_variables(request)
    return await prompt_of(serving, request, made, tools, variables, continue_final_message=continues), tools


# ---- the answer


class BlockDelta(Struct):
    """The one event that comes with every token."""

    type: str
    index: int
    delta: dict[str, str]


_DELTAS = {"reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
_CALL_DELTA = ("input_json_delta", "partial_json")


class MessagesWriter:
    def __init__(self, serving: Serving, request: MessagesRequest, generation: Generation, tools: Tools) -> None:
        self.serving = serving
        self.request = request
        self.generation = generation
        self.id = f"msg_{secrets.token_hex(12)}"
        separate = (request.thinking is not None and request.thinking.type != "disabled") or None
        parser = answer_parser(serving, generation, tools, template_variables(request), separate)
        self.blocks = Blocks(parser, serving.tool_parser)
        self.finish: str | None = None
        self.stop: int | str | None = None

    # ---- as a stream

    def opening(self) -> bytes:
        start = {"type": "message_start", "message": self._message()}
        return named_event("message_start", start) + named_event("ping", {"type": "ping"})

    def piece(self, piece: TextPiece) -> bytes:
        events = self.blocks.push(piece)
        if self.blocks.full:
            piece = self.generation.cut(piece)
        if piece.finish is not None:
            self.finish, self.stop = piece.finish, piece.stop
            events += self.blocks.close()
        return b"".join([self._block_event(event) for event in events])

    def closing(self) -> bytes:
        delta: dict[str, Any] = {"type": "message_delta", "delta": self._stopped(), "usage": self._usage()}
        if self.request.cache_report:
            delta["cache"] = cache_reports(self.serving, self.generation)[0]
        return named_event("message_delta", delta) + named_event("message_stop", {"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        return named_event("error", _error(error))

    def _block_event(self, event: BlockEvent) -> bytes:
        index = event.block.index
        if isinstance(event, BlockOpened):
            name = "content_block_start"
            return named_event(name, {"type": name, "index": index, "content_block": _begun(event.block)})
        if isinstance(event, BlockClosed):
            return named_event("content_block_stop", {"type": "content_block_stop", "index": index})
        kind, field = _DELTAS.get(event.block.kind, _CALL_DELTA)
        delta = {"type": kind, field: event.text}
        return named_event("content_block_delta", BlockDelta("content_block_delta", index, delta))

    # ---- in one piece

    def whole(self) -> dict[str, Any]:
        message = self._message()
        if self.request.cache_report:
            message["cache"] = cache_reports(self.serving, self.generation)[0]
        return message

    def _message(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.generation.model.name,
            "content": [_whole(block) for block in self.blocks.all],
            **self._stopped(),
            "usage": self._usage(),
        }

    def _stopped(self) -> dict[str, Any]:
        reason = None
        if self.finish == "length":
            unbounded = self.generation.params.max_tokens is None
            reason = "model_context_window_exceeded" if unbounded else "max_tokens"
        elif isinstance(self.stop, str):
            reason = "stop_sequence"
        elif self.finish is not None:
            reason = "tool_use" if self.blocks.called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self.stop if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        """The three counts of the prompt do not overlap: tokens read from the cache, written to it, and all others."""
        prompt, completion, cached = self.generation.usage
        written = written_to_cache(self.serving, self.request, self.generation)
        return {
            "input_tokens": prompt - cached - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": cached,
            "output_tokens": completion,
        }


def _begun(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call, "name": block.name, "input": {}}
    return _whole(block)


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments that were cut off are no JSON, and must not look like good ones."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}
