"""What became of a plan: its tokens are known, or it failed and its rows go back to what is real."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sapwood.cache import Lease

from .book import Book, PlanInFlight
from .config import SchedulerConfig
from .events import ProtocolError, StepDone, StepFailed
from .plan import Chunk
from .planner import Planner
from .request import DECODING, ENDED, LOADING, Request

_MAX_TOKEN = 2**31 - 1
_LOOP_MAX_TOKENS = 512
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
        book, cache, decoding = self.book, self.cache, self.book.decoding
        flight = self._flight(event)
        if flight.doomed:
            self._written_off(flight)
            return
        tokens = self._tokens(flight, event.tokens)
        self.counts["steps"] += 1
        del book.flights[0]
        decodes = len(flight.decodes)
        crossed: list[Request] = []
        retired = flight.retired
        if retired:
            retired = [request for request in retired if request.lease is not None]
        if decodes:
            crossed = decoding.advance(flight.decodes, flight.generation, tokens[:decodes])
            if crossed or retired:
                self._publish(crossed, retired, flight.step)
        for request, start, end, _, _ in flight.chunks:
            if request.lease is not None:
                request.computes(start, end)
        commit = cache.step_commit(flight.step, book.flights[-1].step if book.flights else None)
        if commit.real:
            book.transfers.offer(commit.real)
        for replaced in commit.replaced:
            owner = book.owners.get(replaced.lease)
            if owner is not None:
                book.tables.replace(owner.slot, replaced.group, replaced.column, replaced.page)
        for request in flight.left:
            book.vacate(request)
        if decodes:
            if decoding.has_eos_rows:
                for request in decoding.stopped():
                    if request.phase is DECODING:
                        book.end(request, "stop")
            if decoding.tick in decoding.ending:
                for request in decoding.used_up():
                    if request.phase is DECODING:
                        book.end(request, "length")
            for request in retired:
                self._yields(request, int(tokens[flight.decodes.index(request)]))
        if flight.chunks:
            self._after_chunks(flight.chunks, tokens[decodes:])
        if self.slides:
            self._slide(crossed, [chunk.request for chunk in flight.chunks])
        if self.planner.retries:
            self.planner.drop_retried(flight.rows())

    def _publish(self, crossed: list[Request], retired: list[Request], step: int) -> None:
        """Rows whose page is full hand it to the tree, and keep its tokens."""
        pages = self.book.decoding.full_pages(crossed) if crossed else []
        leases: list[Any] = [request.lease for request in crossed]
        for request, page in zip(crossed, pages, strict=True):
            request.pages.append(page)
        for request in retired:
            request.computes(request.done, request.done + 1)
            if request.done % self.config.page_size == 0:
                pages.append(request.tokens[-4 * self.config.page_size :])
                leases.append(request.lease)
        if leases:
            self.cache.publish_rows(leases, pages, step)

    def _after_chunks(self, chunks: list[Chunk], tokens: npt.NDArray[Any]) -> None:
        """Rows that yielded a token end with it, or decode from now on."""
        book, decoding, most = self.book, self.book.decoding, self.config.max_batch_tokens
        sampled = iter(tokens.tolist())
        # Rows join only while no plan of decode rows is in flight that they are not in, and none is tried apart.
        joins = not self.planner.retries and decoding.planned == decoding.tick
        for request, _, end, samples, _ in chunks:
            token = next(sampled) if samples else -1
            if not samples or request.phase is ENDED:
                continue
            generated = end - request.prompt + 1
            stops = generated >= request.min_tokens and token in request.eos
            if request.ahead:
                decoding.arrives(request, token)
                if stops:
                    book.end(request, "stop")
            elif not stops and generated < request.max_tokens and joins and decoding.count < most:
                book.join(request, token)
            else:
                self._yields(request, token)

    def _yields(self, request: Request, token: int) -> None:
        """A request that is not in the decode rows has one more token, and may be over with it."""
        request.tokens += token.to_bytes(4, "little")
        if request.generated >= request.min_tokens and token in request.eos:
            self.book.end(request, "stop")
        elif request.generated >= request.max_tokens:
            self.book.end(request, "length")

    def _slide(self, crossed: list[Request], others: list[Request]) -> None:
        book, tick = self.book, self.book.decoding.tick
        live = [request for request in crossed if request.phase is DECODING]
        positions = [request.lead + tick for request in live]
        for request in others:
            if request.lease is not None:
                live.append(request)
                positions.append(book.position(request))
        leases: list[Any] = [request.lease for request in live]
        for group, (rows, columns) in self.cache.slide_rows(leases, positions).items():
            book.tables.clear(group, [live[row].slot for row in rows], columns)

    def _tokens(self, flight: PlanInFlight, given: object) -> npt.NDArray[Any]:
        """The tokens of the rows that sample, in row order; ProtocolError if they are not exactly those."""
        step = flight.step
        want = len(flight.decodes)
        for chunk in flight.chunks:
            want += chunk.samples
        if type(given) is np.ndarray and given.dtype is _INT32 and given.shape == (want,):  # the usual, quickly
            # The top byte of a token that is not negative is ASCII: for few tokens a quarter of the time of `< 0`.
            if not given.tobytes()[3::4].isascii() if want <= _LOOP_MAX_TOKENS else 1 in (given < 0).tobytes():
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
        if 1 in (tokens < 0).tobytes() or (tokens.dtype != np.int32 and int(tokens.max()) > _MAX_TOKEN):
            raise ProtocolError(f"StepDone({step}): tokens must be from 0 to 2**31 - 1")
        return tokens

    def _flight(self, event: StepDone | StepFailed) -> PlanInFlight:
        flights = self.book.flights
        if not flights or event.step != flights[0].step:
            running = f"step {flights[0].step} runs" if flights else "no step runs"
            raise ProtocolError(f"{type(event).__name__}({event.step!r:.20}) cannot happen now: {running}")
        return flights[0]

    # ---- failed

    def failed(self, event: StepFailed) -> None:
        """All rows of the step go back, and those of the plans made on top of it. The rows of the step are tried again
        in halves, until the culprit is alone; or, if culprits are known, these alone and the others together."""
        book, planner = self.book, self.planner
        flight = self._flight(event)
        culprits = self._culprits(event)
        if flight.doomed:
            self._written_off(flight)
            return
        self.counts["steps_failed"] += 1
        fallen = self.cache.step_failed(flight.step, book.flights[-1].step)
        for failed in book.flights:  # an executor may not have got so far as to see them
            book.seat_again(failed.seated)
        del book.flights[0]
        for request in flight.left:
            book.vacate(request)
        rows = [request for request in flight.rows() if request.phase is not ENDED]
        for request in rows:
            request.failed_at = max(request.failed_at, book.position(request))
        self._withdraw(rows, fallen)
        if planner.retries:
            planner.retries[0] = [request for request in planner.retries[0] if request not in rows]
        if len(flight.decodes) + len(flight.chunks) == 1:
            for request in rows:
                request.tries += 1
                if request.tries >= self.config.max_tries:
                    book.end(request, "failed", str(event.reason)[:1000])
                else:
                    planner.retries.insert(0, rows)
        elif any(request.id in culprits for request in rows):
            alone = [[request] for request in rows if request.id in culprits]
            planner.retries[:0] = [*alone, [request for request in rows if request.id not in culprits]]
        else:
            half = len(rows) // 2
            planner.retries[:0] = [rows[:half], rows[half:]]

    def _withdraw(self, rows: list[Request], fallen: list[Lease]) -> None:
        """What was planned is taken back: from the rows of a step that failed, from those of the plans in flight behind
        it, and from requests that had adopted what these promised."""
        book = self.book
        for later in book.flights:
            later.doomed = True
            rows = [*rows, *[request for request in later.rows() if request.phase is not ENDED]]
        adopted = [book.owners[lease] for lease in fallen if lease in book.owners]
        for request in dict.fromkeys([*rows, *adopted]):
            if request.phase is LOADING:  # the pages before those it waits for are gone
                book.retract(request)
                continue
            if request.phase is DECODING:
                book.sit_out(request)
            self._fall(request)
        book.decoding.withdrawn()
        book.tables.show_all()

    def _written_off(self, flight: PlanInFlight) -> None:
        """The event of a plan that was made on top of one that failed."""
        self.counts["steps_failed"] += 1
        self.cache.step_failed(flight.step, flight.step)
        del self.book.flights[0]
        for request in flight.left:
            self.book.vacate(request)

    @staticmethod
    def _culprits(event: StepFailed) -> frozenset[str]:
        named = event.culprits
        if isinstance(named, str) or not isinstance(named, Collection) or not all(isinstance(id, str) for id in named):
            raise ProtocolError(f"StepFailed({event.step}): culprits must be a list of request ids, got {named!r:.60}")
        return frozenset(named)

    def _fall(self, request: Request) -> None:
        assert request.lease is not None
        request.falls_to(self.cache.rewind(request.lease, request.done))
        self.book.tables.write(request.slot, request.lease)
