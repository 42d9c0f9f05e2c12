"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Any

from .errors import ApiError, bad, shown
from .generation import Generation, Model, Piece, Prompt
from .http import Call, event
from .logprobs import CompletionLogprobs, joined
from .schemas import CompletionRequest, parse
from .serving import Serving, new_id
from .usage import usage_of

_MOST_LOGPROBS = 20
_MOST_SCORES = 1 << 16  # tokens of a prompt with their likeliest others


async def completions(serving: Serving, call: Call) -> Generation:
    request = parse(await call.body(), CompletionRequest)
    model = serving.model(request.model)
    special = request.add_special_tokens is not False
    prompts = [await serving.prompt(each, special) for each in _prompts(request, serving)]
    prompts = serving.truncated(request, prompts)
    top = _logprobs(request)
    most = request.max_tokens
    if most == 0 and request.echo:  # only the prompt is wanted: one token is computed and not shown
        most = 1
    if request.echo and top is not None:
        request.prompt_logprobs = top
        _bound(prompts, top)
    params = serving.params(request, call.caller, max_tokens=most, logprobs=top)
    generation = await serving.begin(prompts, params, request, model, serving.grammar(request))
    writer = CompletionWriter(serving, call, request, model, generation, top)
    if request.stream:
        await call.stream(generation, writer, serving.config.keepalive_seconds)
    else:
        await call.whole(generation, writer)
    return generation


def _prompts(request: CompletionRequest, serving: Serving) -> list[str | list[int]]:
    """Text, token ids, or a list of either."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad("prompt", "the prompt is empty")
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given]  # type: ignore[list-item]
    if int in kinds:
        raise bad("prompt", "prompt must be text, token ids, or a list of either")
    if len(given) > serving.config.max_n:
        raise bad("prompt", f"a request may have {serving.config.max_n} prompts, got {len(given)}")
    if any(not each for each in given):
        raise bad("prompt", "a prompt is empty")
    return given  # type: ignore[return-value]


def _logprobs(request: CompletionRequest) -> int | None:
    asked = request.logprobs
    if asked is None or asked is False:
        return None
    top = 1 if asked is True else asked
    if not 0 <= top <= _MOST_LOGPROBS:
        raise bad("logprobs", f"logprobs must be from 0 to {_MOST_LOGPROBS}, got {shown(top)}")
    return top


def _bound(prompts: list[Prompt], top: int) -> None:
    """The scores of a prompt come all at once, and others wait while they are written down."""
    lengths = [len(prompt.ids) for prompt in prompts]
    for tokens, most in ((max(lengths), _MOST_SCORES), (sum(lengths), 4 * _MOST_SCORES)):
        if tokens * (top + 1) > most:
            said = f"the prompt's {tokens} tokens with {top} more for each are too many to score: {most} may"
            raise bad("logprobs", f"{said}, that is {most // (top + 1)} tokens")


class CompletionWriter:
    def __init__(
        self,
        serving: Serving,
        call: Call,
        request: CompletionRequest,
        model: Model,
        generation: Generation,
        top: int | None,
    ) -> None:
        self.serving = serving
        self.request = request
        self.generation = generation
        self.top = top
        self.id = request.request_id or new_id("cmpl")
        self.created = int(time.time())
        self.model = model.name
        options = request.stream_options
        self.usage = bool(options and options.include_usage)
        self.each = bool(options and options.continuous_usage_stats)
        self.samples = [_Sample() for _ in generation.job.lanes]

    # ---- as a stream

    def opening(self) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        sample = self.samples[piece.index]
        text, scores = "", list[dict[str, Any]]()
        if not sample.begun:
            sample.begun = True
            text, scores = self._prompt(piece.index, sample)
        if not (self.request.echo and self.request.max_tokens == 0):
            text += piece.text
            if sample.logprobs is not None and piece.likely:
                scores.append(sample.logprobs.lists(piece.tokens, list(piece.likely)))
        sample.text.append(text)
        sample.tokens += piece.tokens
        if not self.request.stream:
            sample.scores += scores
        if piece.finish is not None:
            sample.finish, sample.stop = piece.finish, piece.stop
        if not text and not scores and piece.finish is None:
            return b""
        choice: dict[str, Any] = {
            "index": piece.index,
            "text": text,
            "logprobs": joined(scores),
            "finish_reason": piece.finish,
            "stop_reason": piece.stop,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = piece.tokens
        return event(self._told([choice], usage=self.each))

    def _prompt(self, index: int, sample: _Sample) -> tuple[str, list[dict[str, Any]]]:
        """What comes before the first token: nothing, or the prompt."""
        at = index // self.generation.params.n
        prompt = self.generation.prompts[at]
        text = self._echoed(prompt) if self.request.echo else ""
        if self.top is None:
            return text, []
        sample.logprobs = CompletionLogprobs(self.top, self.serving.tokens, 0)
        found = self.generation.scores(at)
        if not self.request.echo or found is None:
            return text, []
        return text, [sample.logprobs.lists(prompt.ids.tolist(), found)]

    def _echoed(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return "" if self.serving.tokens is None else self.serving.tokens.decode(prompt.ids.tolist())

    def closing(self) -> bytes:
        last = b""
        if self.usage or self.request.cache_report:
            last = event(self._told([], usage=self.usage, cache=bool(self.request.cache_report)))
        return last + b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        return event(error.body) + b"data: [DONE]\n\n"

    # ---- in one piece

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, sample in enumerate(self.samples):
            choice: dict[str, Any] = {
                "index": index,
                "text": "".join(sample.text),
                "logprobs": joined(sample.scores),
                "finish_reason": sample.finish,
                "stop_reason": sample.stop,
            }
            if self.request.return_token_ids:
                choice["token_ids"] = sample.tokens
                choice["prompt_token_ids"] = self.generation.prompts[index // self.generation.params.n].ids.tolist()
            choices.append(choice)
        return self._told(choices, usage=True, cache=bool(self.request.cache_report))

    def _told(self, choices: list[Any], usage: bool, cache: bool = False) -> dict[str, Any]:
        told: dict[str, Any] = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if usage:
            told["usage"] = usage_of(self.generation)
        if cache:
            reports = self.serving.report(self.generation)
            told["cache"] = reports[0] if len(reports) == 1 else reports
        return told


class _Sample:
    __slots__ = ("begun", "finish", "logprobs", "scores", "stop", "text", "tokens")

    def __init__(self) -> None:
        self.begun = False
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.scores: list[dict[str, Any]] = []
        self.logprobs: CompletionLogprobs | None = None
        self.finish: str | None = None
        self.stop: int | str | None = None
