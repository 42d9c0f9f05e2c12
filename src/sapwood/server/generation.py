"""One request in flight: prompts in, pieces of text out, until every sample has ended.

    lanes: tokens --> TextStream (whole characters, stop strings) --> TextPiece: text, tokens, log-probabilities, end

The four APIs differ in how they write pieces, and in nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from sapwood.engine.detokenize import Detokenizer
from sapwood.engine.params import SamplingParams
from sapwood.engine.stops import TextStream

from .errors import ApiError, Disconnected, without_paths
from .process.engine_client import LAG_SECONDS, EngineJob, Lane
from .process.messages import MAX_UNACKED_STEPS, End, Likely, SampleBegun

MAX_TAKEN_TOKENS = 2048  # with the likely ones of each, that a request writes before others have their turn


class Model(NamedTuple):
    """The model that a name stands for. `adapter`: None for the model itself."""

    name: str
    adapter: bytes | None


class Prompt(NamedTuple):
    """`text`: as the client or the chat template has it; None for token ids. `cut`: the text begins before the ids."""

    ids: npt.NDArray[np.int32]
    text: str | None = None
    cut: bool = False


class TextPiece(msgspec.Struct, frozen=True, gc=False):
    """The next piece of a sample, which is final. `finish`: in its last piece, why it has ended."""

    index: int
    text: str
    tokens: list[int]
    likely: list[Likely]
    finish: str | None = None
    stop: int | str | None = None


class TokenCounts(NamedTuple):
    prompt: int
    completion: int
    cached: int


class Generation:
    """`prompts` are in the engine, with `params.n` lanes of `job` for each."""

    def __init__(
        self,
        job: EngineJob,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        detokenizer: Detokenizer | None,
        model: Model,
    ) -> None:
        self.model = model
        self.job = job
        self.prompts = prompts
        self.params = params
        self.began = time.monotonic()
        self.first: float | None = None  # when the first token came
        self.finished: str | None = None
        self.held = False  # a grammar holds the answer from its first token on
        self.gaps: list[float] = []  # seconds between tokens of a sample
        self.reasons: list[str] = []  # why samples have ended
        self._completion = self._counted = 0
        self._open = len(job.lanes)
        self._failed: ApiError | None = None
        if detokenizer is not None:
            for at, lane in enumerate(job.lanes):
                lane.text = TextStream(detokenizer, params, prompts[at // params.n].ids[-16:].tolist())
        self._turn_tokens = max(1, MAX_TAKEN_TOKENS // (1 + (params.logprobs or 0)))
        self._next_lane = 0  # that the next turn begins with

    @property
    def usage(self) -> TokenCounts:
        cached = sum(lane.begun.cache.cached for lane in self.job.lanes[:: self.params.n] if lane.begun is not None)
        return TokenCounts(sum(len(prompt.ids) for prompt in self.prompts), self._completion, cached)

    @property
    def begun(self) -> list[SampleBegun | None]:
        """For each prompt, how its first sample began; None if it has not."""
        return [lane.begun for lane in self.job.lanes[:: self.params.n]]

    def uncounted(self) -> int:
        """Tokens that were generated since the last call."""
        new = self._completion - self._counted
        self._counted = self._completion
        return new

    def scores(self, prompt: int) -> list[Likely | None] | None:
        """The log-probabilities of a prompt, where the request asks for them."""
        return self.job.lanes[prompt * self.params.n].prompt

    @property
    def open(self) -> bool:
        """At least one sample has not ended."""
        return self._open > 0

    def take(self) -> list[TextPiece]:
        """The pieces since the last call, up to a bound, since other requests wait while they are written. There is a
        piece for each token while client and process keep up; where one is behind, all tokens of a sample are one
        piece. ApiError if the engine refuses the request, or if it fails; Disconnected if the client has left."""
        job = self.job
        job.news = False
        if job.gone:
            self.finished = "disconnected"
            raise Disconnected
        if self._failed is not None:
            raise self._failed
        found: list[TextPiece] = []
        left, lanes = self._turn_tokens, len(job.lanes)
        try:
            for turn in range(lanes):
                index = (self._next_lane + turn) % lanes
                lane = job.lanes[index]
                if (lane.tokens or lane.end is not None) and not lane.over:
                    if left <= 0:  # the next turn begins here
                        self._next_lane, job.news = index, True
                        break
                    left -= self._take(index, lane, found, left)
        except ApiError as error:
            if not found:
                raise
            self._failed, job.news = error, True  # raised next time, after the pieces before it
        return found

    def cut(self, piece: TextPiece) -> TextPiece:
        """This piece as the last one of its sample, whose other tokens are not wanted."""
        if not self.job.lanes[piece.index].over:
            self._ends(piece.index, "stop")
            self.job.over(piece.index)
        return TextPiece(piece.index, piece.text, piece.tokens, piece.likely, "stop")

    def close(self) -> None:
        """No more pieces are taken: samples that still run are aborted."""
        if self.finished is None:
            self.finished = "aborted" if self._open else "done"
        self.job.close()

    def _take(self, index: int, lane: Lane, found: list[TextPiece], most: int) -> int:
        """Append the pieces of a lane. Returns how many tokens were taken."""
        tokens, lane.tokens = lane.tokens, []
        likely = lane.likely
        if likely:
            lane.likely = []
        end, text = lane.end, lane.text
        if len(tokens) > most:  # for the reader it has not ended yet
            tokens, lane.tokens = tokens[:most], tokens[most:]
            likely, lane.likely = likely[:most], likely[most:]
            end, self.job.news = None, True
        before, count = len(found), len(tokens)
        behind = count > 1 and (count > MAX_UNACKED_STEPS or self.job.link.lag > LAG_SECONDS)
        if count:
            now = self.job.since
            if self.first is None:
                self.first = now
            last, lane.last = lane.last, now
            if last and count == 1:
                self.gaps.append(now - last)
            elif last:
                self.gaps += [(now - last) / count] * count
        ending = tokens.pop() if tokens and end is not None and end.reason == "stop" else None
        for at, token in enumerate(tokens):
            self._completion += 1
            new = "" if text is None else text.push(token)
            scores = likely[at : at + 1] if likely else likely
            if text is not None and text.stopped is not None:
                found.append(TextPiece(index, new, [token], scores, "stop", text.stopped))
                self._ends(index, "stop")
                if end is None:
                    self.job.over(index)
                break
            found.append(TextPiece(index, new, [token], scores))
        else:
            if end is not None:
                if end.reason in ("refused", "busy", "error", "abort", "timeout"):
                    self.reasons.append(end.reason)
                final = self._last(index, end, ending, text, likely[len(tokens) :])
                if len(found) > before:  # the end of a sample goes with its last text, where both have come
                    final = _joined([found.pop(), final])
                found.append(final)
                self._ends(index, end.reason)
        if behind:
            found[before:] = [_joined(found[before:])]
        return count

    def _last(
        self, index: int, end: End, token: int | None, text: TextStream | None, likely: list[Likely]
    ) -> TextPiece:
        if end.reason == "refused":
            raise ApiError(400, end.error, "invalid_request")
        if end.reason == "error":
            status = 500 if self.job.link.down is None else 503
            raise ApiError(status, without_paths(end.error), "engine_error")
        if end.reason == "abort":
            raise ApiError(503, end.error or "the request was aborted", "aborted")
        if end.reason == "busy":
            raise ApiError(503, end.error, "grammars_full", headers={"Retry-After": "1"})
        if end.reason == "timeout":
            raise ApiError(503, end.error, "queue_timeout", headers={"Retry-After": "5"})
        self._completion += token is not None
        new = "" if text is None else text.finish(token)
        stop: int | str | None = end.stop
        if text is not None and text.stopped is not None:
            stop = text.stopped
        return TextPiece(index, new, [] if token is None else [token], likely, end.reason, stop)

    def _ends(self, index: int, reason: str) -> None:
        self.job.lanes[index].over = True
        self.reasons.append(reason)
        self._open -= 1


def _joined(pieces: list[TextPiece]) -> TextPiece:
    last = pieces[-1]
    return TextPiece(
        last.index,
        "".join([piece.text for piece in pieces]),
        [token for piece in pieces for token in piece.tokens],
        [each for piece in pieces for each in piece.likely],
        last.finish,
        last.stop,
    )
