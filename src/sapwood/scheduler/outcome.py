"""What became of a plan: its tokens are known, or it failed and its rows go back to what is real."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .book import Book, Flight
from .config import SchedulerConfig
from .events import ProtocolError, StepDone, StepFailed
from .plan import Chunk
from .planner import Planner
from .request import DECODING, ENDED, LOADING, PREFILLING, Request

_MOST = 2**31 - 1
_FEW = 512
_INT32 = np.dtype(np.int32)


class Outcome:
    def __init__(self, config: SchedulerConfig, book: Book, planner: Planner) -> None:
        self.config = config
        self.book = book
        self.cache = book.cache
        self.planner = planner
        self.slides = book.cache.slides
        self.counts = {"steps": 0, "steps_failed": 0}

    # ---- done

    def done(self, event: StepDone) -> None:
        book, cache = self.book, self.cache
        flight = self._flight(event)
        tokens = self._tokens(flight, event.tokens)
        self.counts["steps"] += 1
        decodes = len(flight.decodes)
        crossed: list[Request] = []
        if decodes:
            crossed = book.decoding.advance(tokens[:decodes])
            if flight.left:
                crossed = [request for request in crossed if request.lease is not None]
            if crossed:
                self._publish(crossed)
        for request, _, end, _, _ in flight.chunks:
            if request.lease is not None:
                request.computes_to(end)
        commit = cache.step_commit(flight.step)
        if commit.real:
            book.transfers.offer(commit.real)
        for replaced in commit.replaced:
            owner = book.owners.get(replaced.lease)
            if owner is not None:
                book.tables.replace(owner.slot, replaced.group, replaced.column, replaced.page)
        book.flight = None
        for request in flight.left:
            book.vacate(request)
        if decodes:
            decoding = book.decoding
            if decoding.listens:
                for request in decoding.stopped():
                    if request.phase is DECODING:
                        book.end(request, "stop")
            if decoding.tick in decoding.ending:
                for request in decoding.used_up():
                    if request.phase is DECODING:
                        book.end(request, "length")
        if flight.chunks:
            self._after_chunks(flight.chunks, tokens[decodes:])
        if self.slides:
            self._slide(crossed, [chunk.request for chunk in flight.chunks])
        if self.planner.retries:
            self.planner.tried(flight.rows())

    def _publish(self, crossed: list[Request]) -> None:
        """Rows whose page is full hand it to the tree, and keep its tokens."""
        pages = self.book.decoding.full_pages(crossed)
        leases: list[Any] = []
        for request, page in zip(crossed, pages, strict=True):
            request.pages.append(page)
            leases.append(request.lease)
        self.cache.publish_rows(leases, pages)

    def _after_chunks(self, chunks: list[Chunk], tokens: npt.NDArray[Any]) -> None:
        """Rows that yielded a token end with it, or decode from now on."""
        book, decoding, most = self.book, self.book.decoding, self.config.max_batch_tokens
        sampled = iter(tokens.tolist())
        apart = bool(self.planner.retries)
        for request, _, end, samples, _ in chunks:
            token = next(sampled) if samples else -1
            if request.phase is ENDED:
                continue
            request.tries = 0
            if not samples:
                continue
            generated = end - request.prompt + 1
            stops = generated >= request.min_tokens and token in request.eos
            if not stops and generated < request.max_tokens and not apart and decoding.count < most:
                book.join(request, token)
                continue
            request.tokens += token.to_bytes(4, "little")
            if stops:
                book.end(request, "stop")
            elif generated >= request.max_tokens:
                book.end(request, "length")

    def _slide(self, crossed: list[Request], others: list[Request]) -> None:
        book, tick = self.book, self.book.decoding.tick
        live = [request for request in crossed if request.phase is DECODING]
        positions = [request.lead + tick for request in live]
        for request in others:
            if request.lease is not None:
                live.append(request)
                positions.append(book.position(request))
        leases: list[Any] = [request.lease for request in live]
        for group, (who, columns) in self.cache.slide_rows(leases, positions).items():
            book.tables.clear(group, [live[i].slot for i in who], columns)

    def _tokens(self, flight: Flight, given: object) -> npt.NDArray[Any]:
        """The tokens of the rows that sample, in row order; ProtocolError if they are not exactly those."""
        step = flight.step
        want = len(flight.decodes)
        for chunk in flight.chunks:
            want += chunk.samples
        if type(given) is np.ndarray and given.dtype is _INT32 and given.shape == (want,):  # the usual, quickly
            # The top byte of a token that is not negative is ASCII: for few tokens a quarter of the time of `< 0`.
            if not given.tobytes()[3::4].isascii() if want <= _FEW else 1 in (given < 0).tobytes():
                raise ProtocolError(f"StepDone({step}): tokens must be from 0 to 2**31 - 1")
            return given
        if isinstance(given, Mapping):
            ids = [request.id for request in flight.decodes]
            ids += [chunk.request.id for chunk in flight.chunks if chunk.samples]
            if len(given) != want or not all(name in given for name in ids):
                wrong = sorted({str(name) for name in given} ^ set(ids))[:3]
                raise ProtocolError(
                    f"StepDone({step}) must have a token for exactly the {want} rows that sample; wrong: {wrong}"
                )
            given = [given[name] for name in ids]
        try:
            tokens = np.asarray(given)
        except (ValueError, OverflowError) as error:
            raise ProtocolError(f"StepDone({step}): tokens must be integers: {error}") from None
        if tokens.ndim != 1 or len(tokens) != want:
            raise ProtocolError(f"StepDone({step}) must have {want} tokens, got shape {tokens.shape}")
        if not want:
            return np.zeros(0, np.int32)
        if tokens.dtype.kind not in "iu":
            raise ProtocolError(f"StepDone({step}): tokens must be integers, got {tokens.dtype}")
        if 1 in (tokens < 0).tobytes() or (tokens.dtype != np.int32 and int(tokens.max()) > _MOST):
            raise ProtocolError(f"StepDone({step}): tokens must be from 0 to 2**31 - 1")
        return tokens

    def _flight(self, event: StepDone | StepFailed) -> Flight:
        flight = self.book.flight
        if flight is None or event.step != flight.step:
            running = f"step {flight.step} runs" if flight is not None else "no step runs"
            raise ProtocolError(f"{type(event).__name__}({event.step!r:.20}) cannot happen now: {running}")
        return flight

    # ---- failed

    def failed(self, event: StepFailed) -> None:
        """Everybody in the step goes back; then they are tried in halves, until the culprit is alone."""
        book, cache, planner = self.book, self.cache, self.planner
        flight = self._flight(event)
        self.counts["steps_failed"] += 1
        fallen = cache.step_failed(flight.step, flight.step)
        book.flight = None
        for request in flight.left:
            book.vacate(request)
        rows = [request for request in flight.rows() if request.phase is not ENDED]
        for request in rows:
            if request.phase is DECODING:
                book.sit_out(request)
            assert request.lease is not None and request.phase is PREFILLING
            request.tries += 1
            self._fall(request)
        for request in [book.owners[lease] for lease in fallen if lease in book.owners]:
            if request.phase is LOADING:  # the pages before those it waits for are gone
                book.retract(request)
            elif request not in rows:  # it had adopted what this step promised, and was not in the step
                if request.phase is DECODING:
                    book.sit_out(request)
                self._fall(request)
        if planner.retries:
            planner.tried(flight.rows())
        if len(rows) == 1:
            alone = len(flight.decodes) + len(flight.chunks) == 1
            if alone and rows[0].tries >= self.config.max_tries:
                book.end(rows[0], "failed", str(event.reason)[:1000])
            else:
                planner.retries.insert(0, rows)
        elif rows:
            half = len(rows) // 2
            planner.retries[:0] = [rows[:half], rows[half:]]

    def _fall(self, request: Request) -> None:
        assert request.lease is not None
        request.falls_to(self.cache.rewind(request.lease, request.position))
        self.book.tables.write(request.slot, request.lease)
