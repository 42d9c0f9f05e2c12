"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from sapwood.engine.params import MOST_STOP_LENGTH, MOST_STOPS

from ..errors import ApiError, bad, shown, unsupported
from ..frontend import Serving
from ..generation import Generation, Prompt, TextPiece
from ..http import Call, named_event
from ..text.answer_parts import AnswerParser, Tools, read_tools
from .anthropic_blocks import chat_choice, chat_messages, chat_tools, most_calls
from .blocks import Block, BlockOpened, Blocks, Closed, Step
from .conversation import begin, in_words_of, prompt_of, written_to_cache
from .schemas import Count, ResponseFormat, Sampling, Text, parse
from .unserved import MESSAGES, also_unserved

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

_Word = Annotated[str, Meta(max_length=MOST_STOP_LENGTH)]


class Thinking(Struct, kw_only=True):
    """`budget_tokens` is taken and changes nothing: a model thinks as long as it does, within max_tokens."""

    type: Annotated[str, Meta(max_length=32)]
    budget_tokens: Count | None = None
    display: Annotated[str, Meta(max_length=32)] | None = None


class OutputConfig(Struct, kw_only=True):
    effort: Annotated[str, Meta(max_length=32)] | None = None
    format: dict[str, Any] | None = None
    task_budget: Any = None


@also_unserved(MESSAGES)
class CountRequest(Sampling, kw_only=True):
    """What makes a prompt."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4096)]
    system: Text | Annotated[list[dict[str, Any]], Meta(max_length=4096)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # as output_config.format was called before
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: Count
    stop_sequences: Annotated[list[_Word], Meta(max_length=MOST_STOPS)] | None = None


def anthropic_error(error: ApiError) -> bytes:
    """An error as Anthropic's clients read it."""
    return msgspec.json.encode(_error(error))


def _error(error: ApiError) -> dict[str, Any]:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


async def messages(serving: Serving, call: Call) -> Generation:
    request = parse(await call.body(), MessagesRequest)
    model = serving.model(request.model)
    with in_words_of(_WORDS):
        prompt, tools = await _prompt(serving, request)
        request.stop = request.stop_sequences
        asked: int | None = request.max_tokens
        if asked and len(prompt.ids) + asked > serving.limit:
            asked = None  # a model whose context ends sooner says so in its stop_reason
        generation = await begin(serving, call, request, model, prompt, tools, max_tokens=asked, logprobs=None)
    writer = MessagesWriter(serving, request, generation, tools)
    if request.stream:
        await call.stream(generation, writer, serving.config.keepalive_seconds)
    else:
        await call.whole(generation, writer)
    return generation


async def count_tokens(serving: Serving, call: Call) -> None:
    request = parse(await call.body(), CountRequest)
    serving.model(request.model)
    with in_words_of(_WORDS):
        prompt, _ = await _prompt(serving, request)
    await call.json({"input_tokens": len(prompt.ids)})


async def _prompt(serving: Serving, request: CountRequest) -> tuple[Prompt, Tools]:
    request.response_format = _format(request)
    choice, most = chat_choice(request.tool_choice), most_calls(request.tool_choice)
    tools = read_tools(chat_tools(request.tools), choice, serving.tool_parser, most)
    made = chat_messages(request.system, request.messages)
    last = made[-1]
    goes_on = last["role"] == "assistant"
    if goes_on and ("tool_calls" in last or not last["content"].strip()):
        path = f"messages[{len(request.messages) - 1}].content"
        raise bad(path, f"{path} must be text for the answer to go on from, or a message of the user must follow")
    return await prompt_of(serving, request, made, tools, _template(request), goes_on), tools


def _template(request: CountRequest) -> dict[str, Any]:
    template = dict(request.chat_template_kwargs or {})
    thinking = request.thinking
    if thinking is not None:
        if thinking.type not in ("enabled", "adaptive", "disabled"):
            raise unsupported("thinking.type", f"it must be enabled, adaptive or disabled, got {shown(thinking.type)}")
        if thinking.display not in (None, "summarized"):
            raise unsupported("thinking.display", "thinking is told as it is")
        if thinking.type != "adaptive":
            template.setdefault("enable_thinking", thinking.type == "enabled")
    if request.output_config is not None and request.output_config.effort is not None:
        template.setdefault("reasoning_effort", request.output_config.effort)
    return template


def _format(request: CountRequest) -> ResponseFormat | None:
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


# ---- the answer


class Delta(Struct):
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
        asked = (request.thinking is not None and request.thinking.type != "disabled") or None
        splitter = serving.splitter(generation, tools, _template(request), asked)
        self.blocks = Blocks(AnswerParser(tools, splitter), serving.tool_parser)
        self.finish: str | None = None
        self.stop: int | str | None = None

    # ---- as a stream

    def opening(self) -> bytes:
        start = {"type": "message_start", "message": self._message()}
        return named_event("message_start", start) + named_event("ping", {"type": "ping"})

    def piece(self, piece: TextPiece) -> bytes:
        steps = self.blocks.push(piece)
        if self.blocks.full:
            piece = self.generation.cut(piece)
        if piece.finish is not None:
            self.finish, self.stop = piece.finish, piece.stop
            steps += self.blocks.close()
        return b"".join([self._step(step) for step in steps])

    def closing(self) -> bytes:
        delta: dict[str, Any] = {"type": "message_delta", "delta": self._stopped(), "usage": self._usage()}
        if self.request.cache_report:
            delta["cache"] = self.serving.report(self.generation)[0]
        return named_event("message_delta", delta) + named_event("message_stop", {"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        return named_event("error", _error(error))

    def _step(self, step: Step) -> bytes:
        index = step.block.index
        if isinstance(step, BlockOpened):
            name = "content_block_start"
            return named_event(name, {"type": name, "index": index, "content_block": _begun(step.block)})
        if isinstance(step, Closed):
            return named_event("content_block_stop", {"type": "content_block_stop", "index": index})
        kind, field = _DELTAS.get(step.block.kind, _CALL_DELTA)
        delta = {"type": kind, field: step.text}
        return named_event("content_block_delta", Delta("content_block_delta", index, delta))

    # ---- in one piece

    def whole(self) -> dict[str, Any]:
        told = self._message()
        if self.request.cache_report:
            told["cache"] = self.serving.report(self.generation)[0]
        return told

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
            left = self.generation.params.max_tokens is None
            reason = "model_context_window_exceeded" if left else "max_tokens"
        elif isinstance(self.stop, str):
            reason = "stop_sequence"
        elif self.finish is not None:
            reason = "tool_use" if self.blocks.called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self.stop if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        """The three numbers of the prompt do not overlap: read from the cache, written to it, and neither."""
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
    """Arguments that are no JSON, because they were cut off, must not look like good ones."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}
