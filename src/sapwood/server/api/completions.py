"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from ..errors import bad, shown
from ..frontend import Serving
from ..generation import Generation, Prompt, TextPiece
from ..http import Call, event
from .answer_fields import ChunkWriter, CompletionLogprobs, cache_reports, joined, prompt_logprobs, usage_of
from .conversation import begin, respond
from .schemas import CompletionRequest, parse

_DEFAULT_TOKENS = 16  # of an answer, where a request does not say how many


async def completions(serving: Serving, call: Call) -> Generation:
    request = parse(await call.body(), CompletionRequest)
    model = serving.models.find(request.model)
    special = request.add_special_tokens is not False
    prompts = [await serving.prompts.given(each, special) for each in _prompts(request, serving)]
    prompts = serving.prompts.truncated(prompts, request.truncate_prompt_tokens, request.truncation_side)
    top = _logprobs(request, serving.parameters.max_logprobs)
    tokens = request.max_tokens
    if tokens is None:
        tokens = max(1, min(_DEFAULT_TOKENS, serving.prompts.limit - max(len(prompt.ids) for prompt in prompts)))
    if tokens == 0 and request.echo:  # only the prompt is wanted: one token is computed and not shown
        tokens = 1
    scores, field = request.prompt_logprobs, "prompt_logprobs"
    if request.echo and top is not None:
        request.prompt_logprobs, field = max(top, scores or 0), "logprobs" if scores is None else field
    generation = await begin(
        serving, call, request, model, prompts, None, max_tokens=tokens, logprobs=top, scores_field=field
    )
    writer = CompletionWriter(serving, request, generation, top, scores)
    return await respond(serving, call, request, generation, writer)


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
    given = request.logprobs
    if given is None or given is False:
        return None
    top = 1 if given is True else given
    if not 0 <= top <= most:
        raise bad("logprobs", f"logprobs must be from 0 to {most}, got {shown(top)}")
    return top


class CompletionWriter(ChunkWriter):
    """`top`, `scores`: how many of the likeliest tokens are shown with each token of the answer, and of the prompt."""

    def __init__(
        self,
        serving: Serving,
        request: CompletionRequest,
        generation: Generation,
        top: int | None,
        scores: int | None,
    ) -> None:
        super().__init__(serving, request, generation, "cmpl")
        self.request = request
        self.top = top
        self.scores = scores
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
        return event(self._body([choice], usage=self.each))

    def _prompt(self, index: int, sample: _Sample) -> tuple[str, list[dict[str, Any]]]:
        """The text and the log-probabilities before the first token: those of the prompt with `echo`, else none."""
        prompt, (at, number) = self._prompt_of(index), divmod(index, self.generation.params.n)
        text = self._echoed(prompt) if self.request.echo else ""
        found = self.generation.scores(at)
        if self.scores is not None and not number:  # encoded as they come, prompt by prompt
            self._scored[at] = prompt_logprobs(prompt.ids.tolist(), found, self.scores, self.serving.prompts.tokens)
        if self.top is None:
            return text, []
        ids = bool(self.request.return_tokens_as_token_ids)
        sample.logprobs = CompletionLogprobs(self.top, self.serving.prompts.tokens, 0, ids)
        if not self.request.echo or found is None:
            return text, []
        return text, [sample.logprobs.lists(prompt.ids.tolist(), found)]

    def _prompt_of(self, index: int) -> Prompt:
        return self.generation.prompts[index // self.generation.params.n]

    def _echoed(self, prompt: Prompt) -> str:
        if prompt.text is not None and not prompt.cut:
            return prompt.text
        return "" if self.serving.prompts.tokens is None else self.serving.prompts.tokens.decode(prompt.ids.tolist())

    def closing(self) -> bytes:
        if not self.usage and not self.request.cache_report:
            return self.done(None)
        return self.done(self._body([], usage=self.usage, cache=bool(self.request.cache_report)))

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
        return self._body(choices, usage=True, cache=bool(self.request.cache_report))

    def _body(self, choices: list[Any], usage: bool, cache: bool = False) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if usage:
            body["usage"] = usage_of(self.generation)
        if cache:
            reports = cache_reports(self.serving, self.generation)
            body["cache"] = reports[0] if len(reports) == 1 else reports
        return body


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
