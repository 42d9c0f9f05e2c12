"""One request in flight: prompts in, pieces of text out, until every sample has ended.

    Job's lanes: tokens --> TextStream (whole characters, stop strings) --> Piece: text, tokens, log-probabilities, end

The four APIs differ in how they write pieces down, and in nothing else.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from sapwood.engine.detokenize import Detokenizer
from sapwood.engine.params import SamplingParams
from sapwood.engine.stops import TextStream

from .errors import ApiError
from .link import LAG, Job, Lane
from .messages import Begun, End, Likely

_SLOW = 0.05  # seconds that a write may take before its reader counts as behind


class Model(NamedTuple):
    """What a name stands for. `adapter`: None for the model itself."""

    name: str
    adapter: bytes | None


class Prompt(NamedTuple):
    """`text`: as the client gave it, or None for token ids."""

    ids: npt.NDArray[np.int32]
    text: str | None = None


class Piece(msgspec.Struct, frozen=True):
    """What became final of a sample. `finish`: why it has ended, with its last piece."""

    index: int
    text: str
    tokens: list[int]
    likely: list[Likely]
    finish: str | None = None
    stop: int | str | None = None


class Usage(NamedTuple):
    prompt: int
    completion: int
    cached: int


class Generation:
    """`prompts` are submitted already, `params.n` lanes of `job` for each."""

    def __init__(
        self,
        job: Job,
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
        self.gaps: list[float] = []  # seconds between tokens of a sample
        self.reasons: list[str] = []  # why samples have ended
        self._completion = 0
        self._open = len(job.lanes)
        self._slow = False
        self._texts = [
            None if detokenizer is None else TextStream(detokenizer, params, prompts[at // params.n].ids[-16:].tolist())
            for at in range(len(job.lanes))
        ]
        self._lasts = [0.0] * len(job.lanes)

    @property
    def usage(self) -> Usage:
        cached = sum(lane.begun.cached for lane in self.job.lanes[:: self.params.n] if lane.begun is not None)
        return Usage(sum(len(prompt.ids) for prompt in self.prompts), self._completion, cached)

    @property
    def begun(self) -> list[Begun | None]:
        """For each prompt: what its first sample was served."""
        return [lane.begun for lane in self.job.lanes[:: self.params.n]]

    def scores(self, prompt: int) -> list[Likely | None] | None:
        """The log-probabilities of a prompt, where they were asked for."""
        return self.job.lanes[prompt * self.params.n].prompt

    def wrote(self, seconds: float) -> None:
        """How long the client took for the last piece."""
        self._slow = seconds > _SLOW

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Pieces as they come: one for each token while everybody keeps up; tokens that wait together go together when
        the client or this process is behind. An empty list: nothing has come for a while. ApiError if the engine
        refuses the request, or it fails. Leaving the loop aborts what still runs."""
        job = self.job
        try:
            while self._open:
                await job.more()
                if job.gone:
                    self.finished = "disconnected"
                    return
                if job.idle:
                    job.idle = False
                    yield []
                    continue
                job.since = time.monotonic()
                together = self._slow or job.link.lag > LAG
                for index, lane in enumerate(job.lanes):
                    if lane.news:
                        pieces = self._take(index, lane, together)
                        if pieces:
                            yield pieces
        finally:
            if self.finished is None:
                self.finished = "done" if not self._open else "aborted"
            job.close()

    def _take(self, index: int, lane: Lane, together: bool) -> list[Piece]:
        tokens, lane.tokens = lane.tokens, []
        likely, lane.likely = lane.likely, []
        end, text = lane.end, self._texts[index]
        if tokens:
            now = self.job.since
            if self.first is None:
                self.first = now
            if self._lasts[index]:
                self.gaps += [(now - self._lasts[index]) / len(tokens)] * len(tokens)
            self._lasts[index] = now
        found: list[Piece] = []
        last = tokens.pop() if tokens and end is not None and end.reason == "stop" else None
        for at, token in enumerate(tokens):
            self._completion += 1
            new = "" if text is None else text.push(token)
            stopped = None if text is None else text.stopped
            scores = likely[at : at + 1]
            if stopped is not None:
                found.append(Piece(index, new, [token], scores, "stop", stopped))
                self._ends(index, "stop")
                if end is None:
                    self.job.over(index)
                return _joined(found) if together else found
            found.append(Piece(index, new, [token], scores))
        if end is not None:
            if end.reason in ("refused", "error", "abort", "timeout"):
                self.reasons.append(end.reason)
            found.append(self._last(index, end, last, text, likely[len(tokens) :]))
            self._ends(index, end.reason)
        return _joined(found) if together else found

    def _last(self, index: int, end: End, token: int | None, text: TextStream | None, likely: list[Likely]) -> Piece:
        if end.reason == "refused":
            raise ApiError(400, end.error, "invalid_request")
        if end.reason == "error":
            raise ApiError(500 if self.job.link.down is None else 503, end.error, "engine_error")
        if end.reason == "abort":
            raise ApiError(503, end.error or "the request was aborted", "aborted")
        if end.reason == "timeout":
            raise ApiError(503, end.error, "queue_timeout", headers={"Retry-After": "5"})
        self._completion += token is not None
        new = "" if text is None else text.finish(token)
        stop: int | str | None = end.stop
        if text is not None and text.stopped is not None:
            stop = text.stopped
        return Piece(index, new, [] if token is None else [token], likely, end.reason, stop)

    def _ends(self, index: int, reason: str) -> None:
        self.job.lanes[index].over = True
        self.reasons.append(reason)
        self._open -= 1


def _joined(pieces: list[Piece]) -> list[Piece]:
    if len(pieces) < 2:
        return pieces
    last = pieces[-1]
    return [
        Piece(
            last.index,
            "".join([piece.text for piece in pieces]),
            [token for piece in pieces for token in piece.tokens],
            [each for piece in pieces for each in piece.likely],
            last.finish,
            last.stop,
        )
    ]
