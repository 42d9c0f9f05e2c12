"""Log-probabilities as the two OpenAI APIs write them down. They are written as tokens come: a long answer has many,
and others wait while they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw

from .messages import Likely
from .tokens import Tokens

_encode = msgspec.json.Encoder().encode


def chat_logprobs(tokens: list[int], likely: list[Likely], top: int, texts: Tokens | None) -> dict[str, Any]:
    content = []
    for token, scores in zip(tokens, likely, strict=False):
        best = sorted((each for each in scores.items() if each[1][1] <= top), key=lambda each: each[1][1])
        named = [_named(other, score, texts) for other, (score, _) in best]
        content.append(Raw(_encode({**_named(token, scores[token][0], texts), "top_logprobs": named})))
    return {"content": content, "refusal": None}


def _named(token: int, score: float, texts: Tokens | None) -> dict[str, Any]:
    raw = b"" if texts is None else texts.detokenizer.token_bytes(token)
    return {"token": _texts(texts)(token), "logprob": _finite(score), "bytes": list(raw)}


class CompletionLogprobs:
    """The four lists of a completion, as far as they go. `offset`: characters before the first token."""

    def __init__(self, top: int, texts: Tokens | None, offset: int) -> None:
        self.top = top
        self.offset = offset
        self._text = _texts(texts)

    def lists(self, tokens: list[int], likely: list[Likely | None]) -> dict[str, Any]:
        names, scores, best, offsets = [], [], [], []
        for token, found in zip(tokens, likely, strict=False):
            name = self._text(token)
            names.append(name)
            offsets.append(self.offset)
            self.offset += len(name)
            scores.append(None if found is None else _finite(found[token][0]))
            best.append(None if found is None else Raw(_encode(self._best(token, found))))
        return {"tokens": names, "token_logprobs": scores, "top_logprobs": best, "text_offset": offsets}

    def _best(self, token: int, found: Likely) -> dict[str, float]:
        """The likeliest tokens, and the one that came, as OpenAI has it. Of tokens with the same text, the likelier."""
        told: dict[str, float] = {}
        for other, (score, rank) in found.items():
            if rank <= self.top or other == token:
                name = self._text(other)
                if score > told.get(name, -9999.5):
                    told[name] = _finite(score)
        return told


def joined(lists: list[dict[str, Any]]) -> dict[str, Any] | None:
    if len(lists) < 2:
        return lists[0] if lists else None
    return {name: [each for some in lists for each in some[name]] for name in lists[0]}


def _texts(texts: Tokens | None) -> Callable[[int], str]:
    return (lambda token: f"token_id:{token}") if texts is None else texts.token_text


def _finite(score: float) -> float:
    """JSON has no infinity."""
    return score if score > -9999.0 else -9999.0
