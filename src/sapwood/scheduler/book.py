"""Who is here: every live request, where it stands, and what it holds. The only place where requests change hands."""

from __future__ import annotations

from collections.abc import Iterator

from sapwood.cache import HybridPrefixCache, Landed, Lease, Match, Reserve

from .config import SchedulerConfig
from .decode import UNKNOWN, DecodeRows
from .events import Ended, Reason
from .plan import Chunk
from .prefetch import Prefetch
from .queue import Queue
from .request import DECODING, FETCHING, LOADING, PREFILLING, WAITING, Request
from .tables import Tables
from .transfers import Transfers


class PlanInFlight:
    """A plan between its making and its event: its rows in order, the decode rows first."""

    __slots__ = ("chunks", "decodes", "doomed", "generation", "left", "retired", "seated", "step")

    def __init__(self, step: int, decodes: list[Request], generation: int, chunks: list[Chunk]) -> None:
        self.step = step
        self.decodes = decodes
        self.generation = generation  # of the decode rows
        self.chunks = chunks
        self.doomed = False  # an earlier one has failed: whatever its event says, it counts as failed
        self.retired: list[Request] = []  # its decode rows that no later plan has: with it they get their last token
        self.seated: list[tuple[int, str]] = []  # slots whose new owners it told
        self.left: list[Request] = []  # over, but their rows run: their slots go when the step is done

    def rows(self) -> list[Request]:
        return self.decodes + [chunk.request for chunk in self.chunks]


class Book:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cache = HybridPrefixCache(
            config.page_size,
            config.groups,
            events=config.events,
            enabled=config.prefix_caching,
            ghost_bytes=config.ghost_bytes,
        )
        self.requests: dict[str, Request] = {}
        self.waiting = Queue()
        self.loading = Queue()
        self.prefilling = Queue()
        self.decoding = DecodeRows(config.page_size, config.max_batch_size)
        self.tables = Tables(self.cache, config.max_batch_size, config.max_columns)
        self.transfers = Transfers(self.cache, config.host_policy == "through")
        self.prefetch = Prefetch(config, self.cache, self.waiting)
        self.step = 0  # of the last plan that has one
        self.flights: list[PlanInFlight] = []  # oldest first
        self.ended: list[Ended] = []  # not told yet
        self.owners: dict[Lease, Request] = {}
        self.counts = {"submitted": 0, "ended": 0, "retractions": 0, "sat_out": 0}

    @property
    def live(self) -> int:
        """Requests that hold memory, or whose rows still run."""
        live = len(self.owners)
        for flight in self.flights:
            live += len(flight.left)
        return live

    def holders(self) -> Iterator[Request]:
        """Everybody who holds memory."""
        return iter(self.owners.values())

    def position(self, request: Request) -> int:
        """Tokens computed, by steps that are done."""
        if request.row >= 0 and not request.ahead:
            return self.decoding.position(request)
        return request.done

    def generated(self, request: Request) -> int:
        """Tokens it is known to have yielded."""
        if request.row >= 0 and not request.ahead:
            return self.decoding.generated(request)
        return request.generated

    def reading(self, request: Request) -> int | None:
        """The newest step in flight with a row of this request."""
        newest = None
        for flight in self.flights:
            decodes = flight.decodes and request.row >= 0 and request.since <= flight.step
            if decodes or request.step == flight.step:
                newest = flight.step
        return newest

    # ---- in

    def admit(self, request: Request, match: Match, upto: int, keep: Reserve) -> bool:
        """Give a waiting request a lease and a slot, if there is room."""
        admitted = self.cache.admit(match, upto, writes=request.writes, keep=keep)
        if admitted is None:
            return False
        lease, operation = admitted
        self.waiting.remove(request)
        request.lease = lease
        request.slot = self.tables.take_slot(request.id)
        request.tried = None
        self.owners[lease] = request
        if self.prefetch.claims.of:
            self.prefetch.claims.drop(request)
        if lease.waits:
            request.happens("admission to load")
            near = match.path.device_closed(match.boundary) * self.cache.page_size
            request.loaded = max(0, lease.start - near)
            self.transfers.load(operation)
            self.loading.add(request)
        else:
            request.happens("admission")
            request.begins_at(lease.start)
            self.prefilling.add(request)
        return True

    def landed(self, landed: Landed) -> None:
        """A load is over: who waited for it goes on, or, if it failed, waits to come in without host."""
        for lease in landed.ready:
            request = self.owners[lease]
            request.happens("its load")
            self.loading.remove(request)
            request.begins_at(lease.start)
            self.prefilling.add(request)
        for lease in landed.failed:
            request = self.owners[lease]
            request.host = False
            request.loaded = request.fetched = 0
            self.retract(request)

    def join(self, request: Request, token: int) -> None:
        """All that is known of it is computed: from now on it decodes."""
        self.prefilling.remove(request)
        self.decoding.join(request, token)
        request.since = self.step + 1

    def look_ahead(self, most: int) -> None:
        """The next plan is made while one is in flight: rows that will have their last token with it are not in the
        next one, and prompts that end with it decode there, up to `most` rows in all."""
        flight, decoding = self.flights[-1], self.decoding
        if flight.decodes:
            for request in decoding.retire():
                request.happens("leaving the decodes")
                request.position += 1
                request.step = flight.step
                self.prefilling.add(request)
                flight.retired.append(request)
        for request, _, end, samples, _ in flight.chunks:
            if samples and request.phase is PREFILLING and request.lease is not None:
                if end - request.prompt + 1 < request.max_tokens and decoding.count < most:
                    self.join(request, UNKNOWN)
                    request.ahead = True

    def seat_again(self, seated: list[tuple[int, str]]) -> None:
        """The plan that told of these owners has failed: those who still have their slots are told again."""
        for slot, id in seated:
            request = self.requests.get(id)
            if request is not None and request.slot == slot:
                self.tables.seat(slot, id)

    def sit_out(self, request: Request) -> None:
        """A decode row cannot run in the next plan."""
        if request.ahead:
            self.decoding.drop(request)
        else:
            self.decoding.leave(request)
        request.happens("leaving the decodes")
        self.prefilling.add(request)

    # ---- out

    def retract(self, request: Request) -> None:
        """Take everything from a request that will come back with the tokens it has."""
        if request.phase is DECODING:
            self.sit_out(request)
        (self.loading if request.phase is LOADING else self.prefilling).remove(request)
        request.happens("retraction")
        assert request.lease is not None and request.position == request.done
        self.transfers.offer([self.cache.retract(request.lease, b"", request.position, None)])
        self._let_go(request)
        request.gives_back()
        request.sat_out = 0
        self.waiting.add(request)
        self.counts["retractions"] += 1

    def end(self, request: Request, reason: Reason, detail: str = "") -> None:
        """A request is over, in whatever phase it is."""
        phase = request.phase
        if request.row >= 0 and not request.ahead:
            position = request.lead + self.decoding.tick
            generated = position + 1 - request.prompt
        else:
            position, generated = request.done, request.generated
        reading = self.reading(request) if self.flights else None
        request.happens("its end")
        if phase is DECODING:
            self.decoding.drop(request)
        elif phase is WAITING:
            self.waiting.remove(request)
        elif phase is PREFILLING:
            self.prefilling.remove(request)
        elif phase is LOADING:
            self.loading.remove(request)
        elif phase is FETCHING:
            self.prefetch.forget(request)
        if self.prefetch.claims.of:
            self.prefetch.claims.drop(request)
        lease = request.lease
        if lease is not None:
            span = self.cache.finish_request(lease, b"", position, reading)
            if span is not None:
                self.transfers.offer([span])
            del self.owners[lease]
            request.lease = None
            if reading is None:
                self.vacate(request)
            else:
                next(flight for flight in self.flights if flight.step == reading).left.append(request)
        self.cache.unbind(request.binding)
        del self.requests[request.id]
        self.counts["ended"] += 1
        told = request.prompt, request.cached, request.computed, request.recomputed, generated
        loaded = min(request.loaded, request.cached)
        fetched = min(request.fetched, loaded)
        self.ended.append(Ended(request.id, reason, *told, detail, loaded, fetched, request.binding.found))

    def vacate(self, request: Request) -> None:
        """Nothing reads its row any more."""
        self.tables.give_slot(request.slot)
        request.slot = -1

    def _let_go(self, request: Request) -> None:
        assert request.lease is not None
        del self.owners[request.lease]
        request.lease = None
        self.vacate(request)

    def take_ended(self) -> list[Ended]:
        ended, self.ended = self.ended, []
        return ended
