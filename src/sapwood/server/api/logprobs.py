"""Log-probabilities as the two OpenAI APIs write them down, and those of prompts as vLLM does. They are written as
tokens come: a long answer has many, and others wait while they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from sapwood.engine.params import Likely, SamplingParams

from ..errors import bad
from ..generation import Prompt
from ..text.tokens import AsyncTokenizer

_encode = msgspec.json.Encoder().encode
_MOST_SCORES = 1 << 16  # tokens of a prompt with their likeliest others


def check_scores(field: str, prompts: Sequence[Prompt], params: SamplingParams) -> None:
    """The scores of a prompt come all at once, and others wait while they are written down."""
    top = params.prompt_logprobs
    if top is None:
        return
    lengths = [len(prompt.ids) for prompt in prompts]
    for tokens, most in ((max(lengths), _MOST_SCORES), (sum(lengths), 4 * _MOST_SCORES)):
        if tokens * (top + 1) > most:
            said = f"the prompt's {tokens} tokens with {top} more for each are too many to score: {most} may"
            raise bad(field, f"{said}, that is {most // (top + 1)} tokens")


class PromptScore(Struct, gc=False):
    logprob: float
    rank: int
    decoded_token: str


def prompt_logprobs(
    tokens: list[int], found: list[Likely | None] | None, top: int, texts: AsyncTokenizer | None
) -> Raw:
    """A list with a place for each token; nothing is known of the first."""
    text, told = _texts(texts), list[bytes]()
    for token, scores in zip(tokens, found or [None] * len(tokens), strict=True):
        known = None
        if scores is not None:
            known = {
                other: PromptScore(_finite(score), rank, text(other))
                for other, (score, rank) in scores.items()
                if rank <= top or other == token
            }
        told.append(_encode(known))
    return Raw(b"[%b]" % b",".join(told))


def chat_logprobs(
    tokens: list[int], likely: list[Likely], top: int, texts: AsyncTokenizer | None, ids: bool = False
) -> dict[str, Any]:
    """`ids`: tokens are named by them."""
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
    """The four lists of a completion, as far as they go. `offset`: characters before the first token. `ids`: tokens are
    named by them."""

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
        """The likeliest tokens, and the one that came, as OpenAI has it. Of tokens with the same text, the likelier."""
        told: dict[str, float] = {}
        for other, (score, rank) in found.items():
            if rank <= self.top or other == token:
                name = self._name(other)
                if score > told.get(name, -9999.5):
                    told[name] = _finite(score)
        return told


def joined(lists: list[dict[str, Any]]) -> dict[str, Any] | None:
    if len(lists) < 2:
        return lists[0] if lists else None
    return {name: [each for some in lists for each in some[name]] for name in lists[0]}


def _texts(texts: AsyncTokenizer | None) -> Callable[[int], str]:
    return (lambda token: f"token_id:{token}") if texts is None else texts.token_text


def _finite(score: float) -> float:
    """JSON has no infinity."""
    return score if score > -9999.0 else -9999.0
