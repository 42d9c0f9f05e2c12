"""A sample: one answer to a prompt, as far as it has come. Tokens become text here, where stop strings are found; and
the grammars of samples become masks over the tokens that a step may choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sapwood.cache import Explanation
from sapwood.scheduler import Ended, RequestSpec

from .cache_report import NOT_COMPUTED, CacheReport
from .params import Likely, SamplingParams
from .stops import TextStream

# Writes what each grammar allows into its row of masks: one after the other, or all at once where grammars can.
Fill = Callable[[Sequence[Any], npt.NDArray[np.int32], Sequence[int]], None]
_REASONS = {"length": "length", "abort": "abort", "failed": "error"}


class Logprob(NamedTuple):
    """The log-probability of a token, its rank from 1, and its text."""

    logprob: float
    rank: int
    decoded_token: str | None


class StepLogprobs(NamedTuple):
    """The log-probabilities that a plan found, by sample."""

    tokens: Mapping[str, Likely]
    prompts: Mapping[str, Sequence[tuple[int, Likely]]]  # with the positions of the tokens


class Grammar(Protocol):
    """Which tokens may come next, as answers of a certain form go on. It follows one sample."""

    def accept(self, token: int) -> None:
        """This token has come."""

    def rollback(self, tokens: int) -> None:
        """The last ones have not come after all."""

    def allowed(self) -> npt.NDArray[np.int32]:
        """The tokens that may come next, as bits of int32 from the lowest on."""


@dataclass(slots=True, eq=False)
class Sample:
    spec: RequestSpec  # what the scheduler is asked for it
    request: str
    index: int  # among the samples of its request
    prompt: npt.NDArray[np.int32]
    params: SamplingParams
    eos: tuple[int, ...]  # tokens that end it
    bad_words: tuple[tuple[int, ...], ...]
    stream: TextStream | None  # None: no text is made
    grammar: Grammar | None = None
    fed: int = 0  # tokens that the grammar has been told
    seated: float = 0.0  # when it first had memory and something was computed for it; 0: not yet
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    cumulative: float = 0.0
    cache: CacheReport = NOT_COMPUTED  # known with the first token
    new_text: str = ""  # what the last token has made final
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str = ""
    arrived: float = 0.0  # when the server got the request, on the monotonic clock
    sent: int = 0  # tokens that the server's API process has been sent

    @property
    def id(self) -> str:
        """As the scheduler knows it."""
        return self.spec.id

    @property
    def text(self) -> str:
        return self.stream.text if self.stream is not None else ""

    @property
    def scores_prompt(self) -> bool:
        """The log-probabilities of its prompt are wanted, and it is the one of its request to find them."""
        return self.params.prompt_logprobs is not None and not self.index

    def takes(self, token: int, likely: Likely | None, tokenizer: Any) -> bool:
        """One more token. True if its text has come to a stop string."""
        self.token_ids.append(token)
        self.new_text = ""
        if likely is not None:
            self.cumulative += likely[token][0]
            self.logprobs.append(_named(likely, token, self.params.logprobs or 0, tokenizer))
        stops = token in self.eos and len(self.token_ids) >= self.params.min_tokens
        if self.stream is None or stops:  # the text of a token that ends it is left to `ends`
            return False
        self.new_text = self.stream.push(token)
        return self.stream.stopped is not None

    def learns(self, position: int, likely: Likely, tokenizer: Any) -> None:
        """How likely the prompt's token at `position` was."""
        token = int(self.prompt[position])
        self.prompt_logprobs[position] = _named(likely, token, self.params.prompt_logprobs or 0, tokenizer)

    def served(self, cached: int, loaded: int, fetched: int, found: Explanation | None) -> None:
        """What of the prompt was not computed; of that, what was brought to the device, and what of that from a store;
        and what admission found."""
        if found is None:
            self.cache = CacheReport(cached)
            return
        shared = max(0, cached - max(found.cached, loaded))
        self.cache = CacheReport(cached, loaded - fetched, fetched, shared, found.reason, found.position)

    def ends(self, end: Ended, model_eos: tuple[int, ...]) -> None:
        self.served(end.cached, end.loaded, end.fetched, end.found)
        last = self.token_ids[-1] if self.token_ids else None
        if self.stream is not None and self.stream.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self.stream.stopped
            del self.token_ids[self.stream.tokens :], self.logprobs[self.stream.tokens :]
            return
        if self.stream is not None:
            self.new_text += self.stream.finish(last if end.reason == "stop" else None)
        self.finish_reason = _REASONS.get(end.reason, "stop")
        if end.reason == "stop":
            self.stop_reason = last if last not in model_eos else None
        elif end.reason == "failed":
            self.error = end.detail


def _named(likely: Likely, token: int, most: int, tokenizer: Any) -> dict[int, Logprob]:
    """The token itself and the `most` likeliest, each with its text."""
    return {
        id: Logprob(value, rank, None if tokenizer is None else str(tokenizer.decode([id])))
        for id, (value, rank) in likely.items()
        if id == token or rank <= most
    }


class GrammarMasks:
    """What the grammars of samples allow. `fill`: another way to write it, where one can do many at once."""

    def __init__(self, vocabulary: int) -> None:
        self.fill: Fill = _one_by_one
        self._width = -(-vocabulary // 32)

    def of(
        self, samples: Sequence[Sample | None], index: npt.NDArray[Any], newest: Callable[[], npt.NDArray[Any]]
    ) -> npt.NDArray[np.int32] | None:
        """A row of bits a sample: the tokens it may choose at `index`; None if none has a grammar. The forward of this
        step runs meanwhile, and the token of the last one may be known to the device alone: `newest` asks it."""
        bound = [
            (row, sample, sample.grammar)
            for row, sample in enumerate(samples)
            if sample is not None and sample.grammar is not None
        ]
        if not bound:
            return None
        masks = np.full((len(samples), self._width), -1, np.int32)
        last: npt.NDArray[Any] | None = None
        for row, sample, grammar in bound:
            due = int(index[row])
            if sample.fed > due:  # a step that failed is tried again
                grammar.rollback(sample.fed - due)
                sample.fed = due
            for at in range(sample.fed, due):
                if at >= len(sample.token_ids) and last is None:
                    last = newest()
                grammar.accept(sample.token_ids[at] if at < len(sample.token_ids) else int(last[row]))  # type: ignore[index]
            sample.fed = due
        self.fill([grammar for _, _, grammar in bound], masks, [row for row, _, _ in bound])
        return masks


def _one_by_one(grammars: Sequence[Grammar], masks: npt.NDArray[np.int32], rows: Sequence[int]) -> None:
    for grammar, row in zip(grammars, rows, strict=True):
        bits = grammar.allowed()
        masks[row, : len(bits)], masks[row, len(bits) :] = bits, 0
