"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType
from msgspec.json import Encoder

from ..errors import bad, shown, unsupported
from ..frontend import Serving
from ..generation import Generation, TextPiece
from ..http import Call
from ..text.answer_parts import AnswerParser, Reasoning, Tools, most_calls, read_tools
from ..text.tools import CallBegins, Content, call_id
from .answer_fields import ChunkWriter, Usage, cache_reports, chat_logprobs, prompt_logprobs, usage_of
from .conversation import answer_parser, begin, prompt_of, respond
from .schemas import ChatRequest, parse

encode = Encoder().encode


class ChoiceEnd(Struct):
    """The fields of a choice behind its delta."""

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
    model = serving.models.find(request.model)
    calls = most_calls(request.parallel_tool_calls)
    tools = read_tools(request.tools, request.tool_choice, serving.tool_parser, calls)
    prompt = await prompt_of(
        serving,
        request,
        request.messages,
        tools,
        _template_variables(serving, request),
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=bool(request.add_special_tokens),
    )
    top, most = request.top_logprobs or 0, serving.parameters.max_logprobs
    if not 0 <= top <= most:
        raise bad("top_logprobs", f"top_logprobs must be from 0 to {most}, got {shown(top)}")
    if top and not request.logprobs:
        raise bad("top_logprobs", "top_logprobs needs logprobs to be true")
    tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    logprobs = top if request.logprobs else None
    generation = await begin(serving, call, request, model, [prompt], tools, max_tokens=tokens, logprobs=logprobs)
    return await respond(serving, call, request, generation, ChatWriter(serving, request, generation, tools))


def _template_variables(serving: Serving, request: ChatRequest) -> dict[str, Any]:
    """What the chat template gets besides messages and tools."""
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    if request.documents:
        if not serving.prompts.template_reads("documents"):
            raise unsupported("documents", "the model's chat template has no place for them")
        variables.setdefault("documents", request.documents)
    return serving.prompts.with_verbosity(variables, "verbosity", request.verbosity)


class ChatWriter(ChunkWriter):
    def __init__(self, serving: Serving, request: ChatRequest, generation: Generation, tools: Tools) -> None:
        super().__init__(serving, request, generation, "chatcmpl")
        self.request = request
        self.tools = tools
        self.top = request.top_logprobs or 0
        self.role = serving.config.response_role
        frame = encode(ChatChunk(self.id, "chat.completion.chunk", self.created, self.model, [])).removesuffix(b"]}")
        self._heads = [b'data: %b{"index":%d,"delta":' % (frame, index) for index in range(generation.params.n)]
        self.shows_reasoning = request.include_reasoning is not False
        variables, separate = request.chat_template_kwargs, request.separate_reasoning
        self.samples = [
            _Sample(answer_parser(serving, generation, tools, variables, separate), serving.tool_parser)
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
        if sample.finish is not None:  # the sample was cut before this piece
            return b""
        parts = sample.parser.push(piece.text) if piece.text else []
        if piece.finish is not None:
            parts += sample.parser.finish()
        if sample.parser.full:
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
        """The fields behind the delta of the last choice of a piece."""
        end = ChoiceEnd()
        if piece.likely:
            ids = bool(self.request.return_tokens_as_token_ids)
            end.logprobs = chat_logprobs(piece.tokens, piece.likely, self.top, self.serving.prompts.tokens, ids)
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
        if not self.usage and not self.request.cache_report:
            return self.done(None)
        last = ChatChunk(self.id, "chat.completion.chunk", self.created, self.model, [])
        if self.usage:
            last.usage = usage_of(self.generation)
        if self.request.cache_report:
            last.cache = cache_reports(self.serving, self.generation)[0]
        return self.done(last)

    def _chunk(self, index: int, delta: bytes, end: bytes) -> bytes:
        """The head of a chunk was encoded before, once for each sample."""
        tail = b'],"usage":' + encode(usage_of(self.generation)) + b"}\n\n" if self.each else b"]}\n\n"
        return self._heads[index] + delta + end + tail

    def _delta(self, sample: _Sample, part: Any) -> bytes:
        """A part of the answer as a delta; b"" if it is not shown. The sample keeps the part for `whole`."""
        if isinstance(part, Content):
            sample.content.append(part.text)
            return b'{"content":' + encode(part.text) + b"}"
        if isinstance(part, Reasoning):
            sample.reasoning.append(part.text)
            return b'{"reasoning_content":' + encode(part.text) + b"}" if self.shows_reasoning else b""
        call: dict[str, Any]
        if isinstance(part, CallBegins):
            begun = {"id": call_id(sample.call_format), "name": part.name, "arguments": []}
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
        answer: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage_of(self.generation),
        }
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = self.generation.prompts[0].ids.tolist()
        if self.request.prompt_logprobs is not None:
            scores, ids = self.generation.scores(0), self.generation.prompts[0].ids.tolist()
            top, texts = self.request.prompt_logprobs, self.serving.prompts.tokens
            answer["prompt_logprobs"] = prompt_logprobs(ids, scores, top, texts)
        if self.request.cache_report:
            answer["cache"] = cache_reports(self.serving, self.generation)[0]
        return answer


class _Sample:
    """One sample so far. `call_format`: of the model's calls."""

    __slots__ = ("call_format", "calls", "content", "finish", "parser", "reasoning", "scores", "stop", "tokens")

    def __init__(self, parser: AnswerParser, call_format: str | None) -> None:
        self.parser = parser
        self.call_format = call_format
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
