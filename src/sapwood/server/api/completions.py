"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Any

from ..errors import ApiError, bad, shown
from ..frontend import Serving, new_id
from ..generation import Generation, Model, Prompt, TextPiece
from ..http import Call, event
from .logprobs import CompletionLogprobs, check_scores, joined, prompt_logprobs
from .schemas import CompletionRequest, parse
from .usage import streamed_usage, usage_of

_TOKENS = 16  # where a request does not say how many


async def completions(serving: Serving, call: Call) -> Generation:
    request = parse(await call.body(), CompletionRequest)
    model = serving.model(request.model)
    special = request.add_special_tokens is not False
    prompts = [await serving.prompt(each, special) for each in _prompts(request, serving)]
    prompts = serving.truncated(request, prompts)
    top = _logprobs(request, serving.max_logprobs)
    most = request.max_tokens
    if most is None:
        most = max(1, min(_TOKENS, serving.limit - max(len(prompt.ids) for prompt in prompts)))
    if most == 0 and request.echo:  # only the prompt is wanted: one token is computed and not shown
        most = 1
    scores, scored = request.prompt_logprobs, "prompt_logprobs"
    if request.echo and top is not None:
        request.prompt_logprobs, scored = max(top, scores or 0), "logprobs" if scores is None else scored
    params = serving.params(request, call.caller, max_tokens=most, logprobs=top)
    check_scores(scored, prompts, params)
    generation = await serving.begin(prompts, params, request, model, call.caller, serving.grammar(request))
    writer = CompletionWriter(serving, call, request, model, generation, top, scores)
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


def _logprobs(request: CompletionRequest, most: int) -> int | None:
    asked = request.logprobs
    if asked is None or asked is False:
        return None
    top = 1 if asked is True else asked
    if not 0 <= top <= most:
        raise bad("logprobs", f"logprobs must be from 0 to {most}, got {shown(top)}")
    return top


class CompletionWriter:
    """`top`, `scores`: how many of the likeliest tokens are told with each of the answer, and of the prompt."""

    def __init__(
        self,
        serving: Serving,
        call: Call,
        request: CompletionRequest,
        model: Model,
        generation: Generation,
        top: int | None,
        scores: int | None,
    ) -> None:
        self.serving = serving
        self.request = request
        self.generation = generation
        self.top = top
        self.scores = scores
        self.id = request.request_id or new_id("cmpl")
        self.created = int(time.time())
        self.model = model.name
        self.usage, self.each = streamed_usage(request.stream_options, serving.config.enable_force_include_usage)
        self.ids = bool(request.return_token_ids)
        self.samples = [_Sample() for _ in generation.job.lanes]
        self._scored: list[Any] = [None] * len(generation.prompts)

    # ---- as a stream

    def opening(self) -> bytes:
        return b""

    def piece(self, piece: TextPiece) -> bytes:
        sample = self.samples[piece.index]
        text, scores = "", list[dict[str, Any]]()
        first = not sample.begun
        if first:
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
        if not text and not scores and not self.ids and piece.finish is None:
            return b""
        choice: dict[str, Any] = {
            "index": piece.index,
            "text": text,
            "logprobs": joined(scores),
            "finish_reason": piece.finish,
            "stop_reason": piece.stop,
        }
        if self.ids:
            choice["token_ids"] = piece.tokens
            if first:
                choice["prompt_token_ids"] = self._prompt_of(piece.index).ids.tolist()
        return event(self._told([choice], usage=self.each))

    def _prompt(self, index: int, sample: _Sample) -> tuple[str, list[dict[str, Any]]]:
        """What comes before the first token: nothing, or the prompt."""
        prompt, (at, number) = self._prompt_of(index), divmod(index, self.generation.params.n)
        text = self._echoed(prompt) if self.request.echo else ""
        found = self.generation.scores(at)
        if self.scores is not None and not number:  # written as they come, prompt by prompt
            self._scored[at] = prompt_logprobs(prompt.ids.tolist(), found, self.scores, self.serving.tokens)
        if self.top is None:
            return text, []
        ids = bool(self.request.return_tokens_as_token_ids)
        sample.logprobs = CompletionLogprobs(self.top, self.serving.tokens, 0, ids)
        if not self.request.echo or found is None:
            return text, []
        return text, [sample.logprobs.lists(prompt.ids.tolist(), found)]

    def _prompt_of(self, index: int) -> Prompt:
        return self.generation.prompts[index // self.generation.params.n]

    def _echoed(self, prompt: Prompt) -> str:
        if prompt.text is not None and not prompt.cut:
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
            if self.ids:
                choice["token_ids"] = sample.tokens
                choice["prompt_token_ids"] = self._prompt_of(index).ids.tolist()
            if self.scores is not None:
                choice["prompt_logprobs"] = self._scored[index // self.generation.params.n]
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
