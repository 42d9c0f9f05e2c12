"""One plan while it is made: what is left of its budgets, and the rows, copies and checkpoints that it has so far."""

from __future__ import annotations

from collections.abc import Iterable

from sapwood.cache import Lease, PageCopy, Reserve

from .book import Book
from .plan import Chunk
from .request import LOADING, LastRefusal, Request

_FIRST_RESERVE = Reserve(least=1)
_MAX_REFUSALS_PER_PLAN = 8  # requests that turn out not to fit, after which a plan looks at no further one
_RETRY_AFTER_PLANS = 16  # plans after which a request that did not fit is tried again although no room was made


class AdapterCap:
    """At most `cap` different adapters in one batch; 0: as many as there are. An adapter counts once one of its rows is
    in the batch; the base model never does."""

    __slots__ = ("cap", "closed", "inside")

    def __init__(self, cap: int, running: Iterable[bytes]) -> None:
        self.cap = cap
        self.inside = set(running) if cap else set()
        self.closed = False

    def admits_new(self, adapter: bytes) -> bool:
        """Whether a row that is no decode row may enter."""
        return not self.closed and self.admits_decoding(adapter)

    def admits_decoding(self, adapter: bytes) -> bool:
        """Whether a row that decodes, and has sat out, may go on."""
        if not self.cap or adapter in self.inside:
            return True
        return not self.closed and len(self.inside) < self.cap

    def enter(self, adapter: bytes) -> None:
        if self.cap:
            self.inside.add(adapter)

    def close(self) -> None:
        """A request has been passed over too often and lacks a place. Until it has one, no new row enters with an
        adapter. Rows of the base model do, and rows that decode go on."""
        self.closed = True


NO_ADAPTER_CAP = AdapterCap(0, ())


class PlanBuilder:
    """Made for one plan. `serve` gives a request a row, and admits it first if it waits; `resume` gives a row to a
    request that holds memory already."""

    def __init__(self, book: Book, budget: int, adapters: AdapterCap) -> None:
        self.book = book
        self.cache = book.cache
        self.page = book.config.page_size
        self.headroom = book.config.headroom
        self.step = book.step + 1
        self.budget = budget  # tokens that chunks may still compute
        self.adapters = adapters
        self.free_places = 0  # requests that may still be admitted
        self.looks = _MAX_REFUSALS_PER_PLAN
        self.pages_ahead = -1  # pages that running requests will still take; counted before the first admission
        self._room: tuple[int, tuple[int, ...]] | None = None  # the cache's `room` and `available`, until one comes in
        self.chunks: list[Chunk] = []
        self.copies: list[PageCopy] = []
        self.checkpoints: list[tuple[Lease, int]] = []  # leases that reach a page end where a snapshot is taken
        self.pending: set[Request] = set()  # requests that wait for a snapshot which another one is making

    # ---- rows

    def serve(self, request: Request) -> bool:
        """A row for a request. One that waits is admitted first, if it can be. False: it is ready, and cannot have a
        row."""
        if request.lease is None:
            if self.free_places <= 0 or self.budget <= 0:
                return True
            if request.adapter is not None and not self.adapters.admits_new(request.adapter):
                return False
            if not self._admit(request):
                if not self.looks:
                    self.free_places = 0
                return request in self.pending
            self.free_places -= 1
        if request.phase is LOADING or len(request.tokens) == 4 * request.position:
            return True
        return self.resume(request)

    def resume(self, request: Request) -> bool:
        """A row for a request that holds memory. False: no budget is left, or its adapter or its pages do not fit."""
        if self.budget <= 0:
            return False
        adapter, caps = request.adapter, self.adapters
        if adapter is not None:
            if not (caps.admits_decoding(adapter) if request.decodes else caps.admits_new(adapter)):
                return False
        chunk = self._chunk(request)
        if chunk is None:
            return False
        self.chunks.append(chunk)
        if adapter is not None:
            caps.enter(adapter)
        return True

    def give_way_to(self, request: Request) -> None:
        """An overdue request cannot have a row: no later one takes what it waits for."""
        if request.adapter is not None and not self.adapters.admits_new(request.adapter):
            self.adapters.close()
        elif request.lease is None or request.sat_out:
            self.free_places = 0

    def _chunk(self, request: Request) -> Chunk | None:
        """The next tokens of a request, as many as the budget and every group can give; None if that is none."""
        cache, lease, page, step = self.cache, request.lease, self.page, self.step
        assert lease is not None
        if request.reads and request.position < lease.length - 1 and lease.opened:
            known = request.tokens if len(request.tokens) == 4 * lease.length else request.tokens[: 4 * lease.length]
            if request.position == request.done:
                request.begins_at(cache.adopt(lease, known, request.position))
            elif cache.could_adopt(lease, known, request.position):
                return None  # by the next plan none of its rows is in flight, and it need not compute this
        start = request.position
        known_to = len(request.tokens) // 4
        end = start + self.budget
        if end > known_to:
            end = known_to
        if lease.cuts:
            end = self._end_at_cut(lease.cuts, start, end)
        if cache.reach(lease) < end:
            end = cache.growable(lease, end)
            if end <= start or not cache.grow(lease, end):
                request.sat_out += 1
                self.book.counts["sat_out"] += 1
                return None
        request.sat_out = 0
        if not lease.opened:
            self.copies += cache.opening(lease, step)
        write_from = cache.write_from(lease, start)
        cache.publish(lease, request.tokens, end // page, step)
        if lease.cuts and not end % page and end // page in lease.cuts:
            self.checkpoints.append((lease, end // page))
        self.book.tables.write(request.slot, lease)
        request.position, request.step = end, step
        self.budget -= end - start
        return Chunk(request, start, end, end == known_to, write_from)

    def _end_at_cut(self, cuts: tuple[int, ...], start: int, end: int) -> int:
        """Where a chunk ends so that a snapshot can be taken."""
        for cut in cuts:
            if start < cut * self.page < end:
                end = cut * self.page
        return end

    # ---- admission

    def _admit(self, request: Request) -> bool:
        """Give a waiting request its memory, if there is enough. If another request is making a snapshot that it could
        start from, it waits for that."""
        refusal, book = request.refusal, self.book
        if refusal is not None and self._would_be_refused(refusal):
            return False
        match = book.match(request)
        if match.pending:
            self.pending.add(request)
            return False
        upto = match.start + self.budget
        if upto > match.length:  # a cut does not matter here: what comes behind it needs its pages a step later
            upto = match.length
        want = self._want(request)
        keep = _FIRST_RESERVE  # nothing else runs: it may take whatever it needs
        if book.owners:  # running requests must be able to go on for a while, and so must this one
            if self.pages_ahead < 0:
                self._count_ahead()
            keep = Reserve(want, self.pages_ahead, len(book.owners), 1)
        if book.admit(request, match, upto, keep):
            if self.pages_ahead >= 0:
                self.pages_ahead += self._ahead_of(request, want)
            self._room = None
            return True
        if book.owners:
            self.looks -= 1
            needed = max(0, -(-want // self.page) - match.depth)
            short = needed + self.pages_ahead > self.cache.room()
            request.refusal = LastRefusal(book.step, needed, None if short else self.cache.available())
        return False

    def _would_be_refused(self, last: LastRefusal) -> bool:
        """Whether a request that did not fit a short while ago would not fit now either, without a walk of the tree."""
        if not self.book.owners or self.book.step - last.step >= _RETRY_AFTER_PLANS:
            return False
        if self.pages_ahead < 0:
            self._count_ahead()
        if self._room is None:
            self._room = self.cache.room(), self.cache.available()
        pages, available = self._room
        if last.needed + self.pages_ahead > pages:
            return True
        if last.available is None:
            return False
        return all(now <= then for now, then in zip(available, last.available, strict=True))

    def _want(self, request: Request) -> int:
        """How many tokens a request will have soon."""
        soon = len(request.tokens) // 4 + self.headroom
        return soon if soon < request.final else request.final

    def _count_ahead(self) -> None:
        book = self.book
        self.pages_ahead = book.decoding.room_ahead(self.headroom)
        for other in [*book.prefilling.items, *book.loading.items]:
            self.pages_ahead += self._ahead_of(other, self._want(other))

    def _ahead_of(self, request: Request, want: int) -> int:
        """Pages that a request which does not decode yet will take."""
        assert request.lease is not None
        more = -(-want // self.page) - self.cache.columns(request.lease)
        return more if more > 0 else 0
