"""Log-probabilities as the two OpenAI APIs write them down."""

from __future__ import annotations

from typing import Any

from .messages import Likely
from .tokens import Tokens


def chat_logprobs(tokens: list[int], likely: list[Likely], top: int, texts: Tokens | None) -> dict[str, Any]:
    content = []
    for token, scores in zip(tokens, likely, strict=False):
        best = sorted((each for each in scores.items() if each[1][1] <= top), key=lambda each: each[1][1])
        content.append(
            {
                **_named(token, scores[token][0], texts),
                "top_logprobs": [_named(other, score, texts) for other, (score, _) in best],
            }
        )
    return {"content": content, "refusal": None}


def _named(token: int, score: float, texts: Tokens | None) -> dict[str, Any]:
    raw = _bytes(token, texts)
    return {"token": _text(token, raw, texts), "logprob": _finite(score), "bytes": list(raw)}


class CompletionLogprobs:
    """The four lists of a completion, as far as they go. `offset`: characters before the first token."""

    def __init__(self, top: int, texts: Tokens | None, offset: int) -> None:
        self.top = top
        self.texts = texts
        self.offset = offset

    def lists(self, tokens: list[int], likely: list[Likely | None]) -> dict[str, Any]:
        names, scores, best, offsets = [], [], [], []
        for token, found in zip(tokens, likely, strict=False):
            text = _text(token, _bytes(token, self.texts), self.texts)
            names.append(text)
            offsets.append(self.offset)
            self.offset += len(text)
            scores.append(None if found is None else _finite(found[token][0]))
            best.append(None if found is None else self._best(token, found))
        return {"tokens": names, "token_logprobs": scores, "top_logprobs": best, "text_offset": offsets}

    def _best(self, token: int, found: Likely) -> dict[str, float]:
        """The likeliest tokens, and the one that came, as OpenAI has it."""
        told: dict[str, float] = {}
        for other, (score, rank) in sorted(found.items(), key=lambda each: each[1][1]):
            if rank <= self.top or other == token:
                told.setdefault(_text(other, _bytes(other, self.texts), self.texts), _finite(score))
        return told


def joined(lists: list[dict[str, Any]]) -> dict[str, Any] | None:
    if not lists:
        return None
    return {name: [each for some in lists for each in some[name]] for name in lists[0]}


def _bytes(token: int, texts: Tokens | None) -> bytes:
    return b"" if texts is None else texts.detokenizer.token_bytes(token)


def _text(token: int, raw: bytes, texts: Tokens | None) -> str:
    return f"token_id:{token}" if texts is None else raw.decode(errors="replace")


def _finite(score: float) -> float:
    """JSON has no infinity."""
    return max(-9999.0, score)
