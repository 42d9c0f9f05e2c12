"""What several APIs write into their answers: token counts, the cache report, the head and the end of OpenAI's chunks,
and log-probabilities. These are encoded as tokens come: a long answer has many, and to encode all of them at its end
would hold up other requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from sapwood.engine.cache_report import TIERS
from sapwood.engine.params import SamplingParams

from ..errors import ApiError, bad
from ..frontend import Serving
from ..generation import Generation, Prompt
from ..http import event, new_id
from ..limits import MAX_SCORED_TOKENS, MAX_SCORED_TOKENS_IN_ALL
from ..process.messages import Likely, SampleBegun
from ..text.tokens import AsyncTokenizer
from .schemas import ChatRequest, CompletionRequest, Sampling

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"


# ---- token counts


class Details(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Details


def usage_of(generation: Generation) -> Usage:
    prompt, completion, cached = generation.usage
    return Usage(prompt, completion, prompt + completion, Details(cached))


def written_to_cache(serving: Serving, request: Sampling, generation: Generation) -> int:
    """Tokens of the prompt that were computed and fill whole pages, which the cache keeps for the next request."""
    if request.cache_prompt is False or serving.link.ready is None:
        return 0
    prompt, _, cached = generation.usage
    page = serving.link.ready.page_size
    return max(0, prompt // page * page - cached)


# ---- the cache report


def cache_reports(serving: Serving, generation: Generation) -> list[dict[str, Any]]:
    """For each prompt: tokens by the tier that served them, and why no more were served, with the requester's own text
    around the place."""
    begun = zip(generation.prompts, generation.begun, strict=True)
    return [_cache_report(serving, prompt, sample) for prompt, sample in begun]


def _cache_report(serving: Serving, prompt: Prompt, begun: SampleBegun | None) -> dict[str, Any]:
    if begun is None:
        return {"prompt_tokens": len(prompt.ids), "cached_tokens": 0}
    cache = begun.cache
    report: dict[str, Any] = {"prompt_tokens": len(prompt.ids), "cached_tokens": cache.cached}
    report |= zip(TIERS, cache.by_tier, strict=True)
    report["miss"] = None
    if cache.missed:
        around = serving.prompts.text_around(prompt, cache.position)
        report["miss"] = {"reason": cache.reason, "position": cache.position, **around}
    return report


# ---- OpenAI's chunks


class ChunkWriter:
    """The part of the writers of chat completions and completions that is the same."""

    def __init__(
        self, serving: Serving, request: ChatRequest | CompletionRequest, generation: Generation, prefix: str
    ) -> None:
        self.serving = serving
        self.generation = generation
        self.id = request.request_id or new_id(prefix)
        self.created = int(time.time())
        self.model = generation.model.name
        options = request.stream_options
        forced = serving.config.enable_force_include_usage
        self.usage = forced or bool(options and options.include_usage)  # the last chunk of a stream has it
        self.each = self.usage and bool(options and options.continuous_usage_stats)  # all chunks have it

    def done(self, last: Any) -> bytes:
        """The end of a stream. `last`: a chunk without choices, or None."""
        return _DONE if last is None else event(last) + _DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body) + _DONE


# ---- log-probabilities


def check_scores(field: str, prompts: Sequence[Prompt], params: SamplingParams) -> None:
    """400 for more scores of prompts than may be encoded at a time: those of a prompt come all at once, and other
    requests wait meanwhile."""
    top = params.prompt_logprobs
    if top is None:
        return
    lengths = [len(prompt.ids) for prompt in prompts]
    for tokens, most in ((max(lengths), MAX_SCORED_TOKENS), (sum(lengths), MAX_SCORED_TOKENS_IN_ALL)):
        if tokens * (top + 1) > most:
            problem = f"the prompt's {tokens} tokens with {top} more for each are too many to score: {most} may"
            raise bad(field, f"{problem}, that is {most // (top + 1)} tokens")


class PromptScore(Struct, gc=False):
    logprob: float
    rank: int
    decoded_token: str


def prompt_logprobs(
    tokens: list[int], found: list[Likely | None] | None, top: int, texts: AsyncTokenizer | None
) -> Raw:
    """As vLLM writes them: a list with an item for each token of the prompt, which is null for the first."""
    text, encoded = _texts(texts), list[bytes]()
    for token, scores in zip(tokens, found or [None] * len(tokens), strict=True):
        known = None
        if scores is not None:
            known = {
                other: PromptScore(_finite(score), rank, text(other))
                for other, (score, rank) in scores.items()
                if rank <= top or other == token
            }
        encoded.append(_encode(known))
    return Raw(b"[%b]" % b",".join(encoded))


def chat_logprobs(
    tokens: list[int], likely: list[Likely], top: int, texts: AsyncTokenizer | None, ids: bool = False
) -> dict[str, Any]:
    """`ids`: tokens are named by their ids."""
    content = []
    for token, scores in zip(tokens, likely, strict=False):
        best = sorted((each for each in scores.items() if each[1][1] <= top), key=lambda each: each[1][1])
        named = [_named(other, score, texts, ids) for other, (score, _) in best]
        content.append(Raw(_encode({**_named(token, scores[token][0], texts, ids), "top_logprobs": named})))
    return {"content": content, "refusal": None}


def _named(token: int, score: float, texts: AsyncTokenizer | None, ids: bool) -> dict[str, Any]:
    raw = b"" if texts is None else texts.detokenizer.token_bytes(token)
    return {"token": _texts(None if ids else texts)(token), "logprob": _finite(score), "bytes": list(raw)}


class CompletionLogprobs:
    """The four lists of a completion, piece by piece. `offset`: characters before the first token. `ids`: tokens are
    named by their ids."""

    def __init__(self, top: int, texts: AsyncTokenizer | None, offset: int, ids: bool = False) -> None:
        self.top = top
        self.offset = offset
        self._text = _texts(texts)
        self._name = _texts(None) if ids else self._text

    def lists(self, tokens: list[int], likely: list[Likely | None]) -> dict[str, Any]:
        names, scores, best, offsets = [], [], [], []
        for token, found in zip(tokens, likely, strict=False):
            names.append(self._name(token))
            offsets.append(self.offset)
            self.offset += len(self._text(token))
            scores.append(None if found is None else _finite(found[token][0]))
            best.append(None if found is None else Raw(_encode(self._best(token, found))))
        return {"tokens": names, "token_logprobs": scores, "top_logprobs": best, "text_offset": offsets}

    def _best(self, token: int, found: Likely) -> dict[str, float]:
        """The likeliest tokens and the chosen one, as OpenAI has it. Of tokens with the same text, the likelier one."""
        best: dict[str, float] = {}
        for other, (score, rank) in found.items():
            if rank <= self.top or other == token:
                name = self._name(other)
                if score > best.get(name, -9999.5):
                    best[name] = _finite(score)
        return best


def joined(lists: list[dict[str, Any]]) -> dict[str, Any] | None:
    if len(lists) < 2:
        return lists[0] if lists else None
    return {name: [each for some in lists for each in some[name]] for name in lists[0]}


def _texts(texts: AsyncTokenizer | None) -> Callable[[int], str]:
    return (lambda token: f"token_id:{token}") if texts is None else texts.token_text


def _finite(score: float) -> float:
    """JSON has no infinity."""
    return score if score > -9999.0 else -9999.0
