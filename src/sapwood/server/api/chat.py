"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from msgspec.json import Encoder

from ..errors import ApiError, bad, shown, unsupported
from ..frontend import Serving, new_id
from ..generation import Generation, Model, TextPiece
from ..http import Call, event
from ..text.answer_parts import AnswerParser, Reasoning, Tools, most_calls, read_tools
from ..text.tools import CallBegins, Content, call_id
from .logprobs import chat_logprobs, check_scores, prompt_logprobs
from .schemas import ChatRequest, parse
from .usage import Usage, streamed_usage, usage_of

encode = Encoder().encode


class ChoiceEnd(Struct):
    """What stands behind the delta of a choice."""

    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


_NOTHING = b'{"content":""}'
_PLAIN_END = b"," + encode(ChoiceEnd())[1:]


class ChatChunk(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType = UNSET
    cache: Any = UNSET


async def chat_completions(serving: Serving, call: Call) -> Generation:
    request = parse(await call.body(), ChatRequest)
    model = serving.model(request.model)
    calls = most_calls(request.parallel_tool_calls)
    tools = read_tools(request.tools, request.tool_choice, serving.tool_parser, calls)
    prompt = await serving.conversation(
        request.messages,
        tools=tools.shown,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        more=_template(serving, request),
        add_special_tokens=bool(request.add_special_tokens),
    )
    top = request.top_logprobs or 0
    if not 0 <= top <= serving.max_logprobs:
        raise bad("top_logprobs", f"top_logprobs must be from 0 to {serving.max_logprobs}, got {shown(top)}")
    if top and not request.logprobs:
        raise bad("top_logprobs", "top_logprobs needs logprobs to be true")
    most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    tools.show_marks(request)
    params = serving.params(request, call.caller, max_tokens=most, logprobs=top if request.logprobs else None)
    grammar = serving.grammar(request, tools)
    (prompt,) = serving.truncated(request, [prompt])
    check_scores("prompt_logprobs", [prompt], params)
    generation = await serving.begin([prompt], params, request, model, call.caller, grammar)
    writer = ChatWriter(serving, call, request, model, generation, tools)
    if request.stream:
        await call.stream(generation, writer, serving.config.keepalive_seconds)
    else:
        await call.whole(generation, writer)
    return generation


def _template(serving: Serving, request: ChatRequest) -> dict[str, Any]:
    """What the chat template is told besides the conversation."""
    template = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        template.setdefault("reasoning_effort", request.reasoning_effort)
    if request.documents:
        if not serving.template_knows("documents"):
            raise unsupported("documents", "the model's chat template has no place for them")
        template.setdefault("documents", request.documents)
    return serving.with_verbosity(template, "verbosity", request.verbosity)


class ChatWriter:
    def __init__(
        self, serving: Serving, call: Call, request: ChatRequest, model: Model, generation: Generation, tools: Tools
    ) -> None:
        self.serving = serving
        self.request = request
        self.generation = generation
        self.tools = tools
        self.id = request.request_id or new_id("chatcmpl")
        self.created = int(time.time())
        self.model = model.name
        self.usage, self.each = streamed_usage(request.stream_options, serving.config.enable_force_include_usage)
        self.top = request.top_logprobs or 0
        self.role = serving.config.response_role
        frame = encode(ChatChunk(self.id, "chat.completion.chunk", self.created, self.model, [])).removesuffix(b"]}")
        self._heads = [b'data: %b{"index":%d,"delta":' % (frame, index) for index in range(generation.params.n)]
        self.shows_reasoning = request.include_reasoning is not False
        template, asked = request.chat_template_kwargs, request.separate_reasoning
        self.samples = [
            _Sample(AnswerParser(tools, serving.splitter(generation, tools, template, asked)), serving.tool_parser)
            for _ in range(generation.params.n)
        ]

    # ---- as a stream

    def opening(self) -> bytes:
        begun = encode({"role": self.role, "content": ""})
        first, *others = [self._chunk(index, begun, _PLAIN_END) for index in range(len(self.samples))]
        if self.request.return_token_ids:
            ids = encode(self.generation.prompts[0].ids.tolist())
            first = b'%b,"prompt_token_ids":%b}\n\n' % (first.removesuffix(b"}\n\n"), ids)
        return b"".join([first, *others])

    def piece(self, piece: TextPiece) -> bytes:
        sample = self.samples[piece.index]
        if sample.finish is not None:  # cut before this piece
            return b""
        parts = sample.spoken.push(piece.text) if piece.text else []
        if piece.finish is not None:
            parts += sample.spoken.finish()
        if sample.spoken.full:
            piece = self.generation.cut(piece)
        plain = piece.finish is None and not piece.likely and not self.request.return_token_ids
        deltas = []
        for part in parts:
            delta = self._delta(sample, part)
            if delta:
                deltas.append(delta)
        if not deltas:
            if plain:
                return b""
            deltas.append(_NOTHING)
        end = _PLAIN_END if plain else self._end(sample, piece)
        if len(deltas) == 1:
            return self._chunk(piece.index, deltas[0], end)
        last = deltas.pop()
        before = [self._chunk(piece.index, delta, _PLAIN_END) for delta in deltas]
        return b"".join([*before, self._chunk(piece.index, last, end)])

    def _end(self, sample: _Sample, piece: TextPiece) -> bytes:
        """What the last choice of a piece tells besides its delta."""
        end = ChoiceEnd()
        if piece.likely:
            ids = bool(self.request.return_tokens_as_token_ids)
            end.logprobs = chat_logprobs(piece.tokens, piece.likely, self.top, self.serving.tokens, ids)
            if not self.request.stream:
                sample.scores += end.logprobs["content"]
        if self.request.return_token_ids:
            sample.tokens += piece.tokens
            end.token_ids = piece.tokens
        if piece.finish is not None:
            sample.ends(piece, self.tools)
            end.finish_reason = sample.finish
            if piece.stop is not None:
                end.stop_reason = piece.stop
        return b"," + encode(end)[1:]

    def closing(self) -> bytes:
        last = b""
        if self.usage or self.request.cache_report:
            chunk = ChatChunk(self.id, "chat.completion.chunk", self.created, self.model, [])
            if self.usage:
                chunk.usage = usage_of(self.generation)
            if self.request.cache_report:
                chunk.cache = self.serving.report(self.generation)[0]
            last = event(chunk)
        return last + b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        return event(error.body) + b"data: [DONE]\n\n"

    def _chunk(self, index: int, delta: bytes, end: bytes) -> bytes:
        """All of a chunk but its delta and what stands behind it is known before."""
        tail = b'],"usage":' + encode(usage_of(self.generation)) + b"}\n\n" if self.each else b"]}\n\n"
        return self._heads[index] + delta + end + tail

    def _delta(self, sample: _Sample, part: Any) -> bytes:
        """What a part is on the wire; nothing, if it is not shown. The sample keeps it too."""
        if isinstance(part, Content):
            sample.content.append(part.text)
            return b'{"content":' + encode(part.text) + b"}"
        if isinstance(part, Reasoning):
            sample.reasoning.append(part.text)
            return b'{"reasoning_content":' + encode(part.text) + b"}" if self.shows_reasoning else b""
        call: dict[str, Any]
        if isinstance(part, CallBegins):
            begun = {"id": call_id(sample.parser), "name": part.name, "arguments": []}
            sample.calls.append(begun)
            function = {"name": part.name, "arguments": ""}
            call = {"index": part.index, "id": begun["id"], "type": "function", "function": function}
        else:
            sample.calls[part.index]["arguments"].append(part.text)
            call = {"index": part.index, "function": {"arguments": part.text}}
        return encode({"tool_calls": [call]})

    # ---- in one piece

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, sample in enumerate(self.samples):
            message: dict[str, Any] = {"role": self.role, "content": "".join(sample.content) or None}
            if not sample.calls and message["content"] is None:
                message["content"] = ""
            message["refusal"] = None
            if sample.reasoning and self.shows_reasoning:
                message["reasoning_content"] = "".join(sample.reasoning)
            if sample.calls:
                message["tool_calls"] = sample.whole_calls()
            choice: dict[str, Any] = {
                "index": index,
                "message": message,
                "logprobs": {"content": sample.scores, "refusal": None} if self.request.logprobs else None,
                "finish_reason": sample.finish,
                "stop_reason": sample.stop,
            }
            if self.request.return_token_ids:
                choice["token_ids"] = sample.tokens
            choices.append(choice)
        told: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage_of(self.generation),
        }
        if self.request.return_token_ids:
            told["prompt_token_ids"] = self.generation.prompts[0].ids.tolist()
        if self.request.prompt_logprobs is not None:
            scores, ids = self.generation.scores(0), self.generation.prompts[0].ids.tolist()
            told["prompt_logprobs"] = prompt_logprobs(ids, scores, self.request.prompt_logprobs, self.serving.tokens)
        if self.request.cache_report:
            told["cache"] = self.serving.report(self.generation)[0]
        return told


class _Sample:
    """What a sample has said so far."""

    __slots__ = ("calls", "content", "finish", "parser", "reasoning", "scores", "spoken", "stop", "tokens")

    def __init__(self, spoken: AnswerParser, parser: str | None) -> None:
        self.spoken = spoken
        self.parser = parser  # the format of calls
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.tokens: list[int] = []
        self.scores: list[Any] = []
        self.finish: str | None = None
        self.stop: int | str | None = None

    def ends(self, piece: TextPiece, tools: Tools) -> None:
        self.finish, self.stop = piece.finish, piece.stop
        if self.calls and piece.finish == "stop" and tools.choice.mode != "named":
            self.finish = "tool_calls"

    def whole_calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
            }
            for call in self.calls
        ]
