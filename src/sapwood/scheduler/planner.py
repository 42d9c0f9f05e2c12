"""Making a plan: who grows, who computes which chunk, who comes in. The order of things in one plan:

    0. retries     rows of a step that failed are tried apart from each other, and nobody else runs
    1. relief      who could not grow in the last plan gets room, at the cost of the least urgent
    2. decodes     every decode row gets the page it needs, or sits out
    3. chunks      first who was passed over too often, oldest first; then decode rows that sat out; then by urgency,
                   and within it: requests that hold memory and have tokens to compute, then those that wait, each in
                   order of arrival. Each takes what is left of the token budget

With `mixed=False` chunks come first, and decodes only if there are none, or if one of them was passed over too often.

While a plan is in flight, the next is made from what is certain (`Book.look_ahead`). Whatever would have a row sit out,
be retracted or be tried again waits until nothing is in flight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from heapq import merge
from operator import attrgetter

from sapwood.cache import Lease, Match, PageCopy, Reserve

from .adapter_cap import AdapterCap
from .book import Book, PlanInFlight
from .config import SchedulerConfig
from .plan import Chunk, Plan, batch_of, decode_batch
from .policy import POLICIES
from .pressure import Pressure
from .request import DECODING, ENDED, LOADING, PREFILLING, WAITING, Request

_arrival = attrgetter("arrival")
_new = tuple.__new__  # a NamedTuple in a third of the time
_FIRST_RESERVE = Reserve(least=1)
_MAX_MISFITS_PER_PLAN = 8  # requests that turn out not to fit, after which a plan looks at nobody else
_RETRY_AFTER_PLANS = 16  # plans after which a request that did not fit is tried again although no room was made


class Planner:
    def __init__(self, config: SchedulerConfig, book: Book) -> None:
        self.config = config
        self.book = book
        self.cache = book.cache
        self.page = config.page_size
        self.headroom = config.headroom
        self.mixed_tokens = config.mixed_tokens or config.max_batch_tokens
        self.snapshots = self.cache.keeps_snapshots
        self.pressure = Pressure(book)
        self.policy = POLICIES[config.policy]()
        self.most = config.max_overtaken  # 0: everybody is overdue who has been passed over at all, and who waits
        self.overdue: list[Request] = []  # passed over too often, when they were last looked at
        self.adapter_cap = AdapterCap(0, ())
        self.retries: list[list[Request]] = []  # rows of failed steps, to be tried apart from each other
        self.groups = [group.name for group in self.cache.groups]

    def plan(self) -> Plan:
        """The next plan; empty if nobody can run."""
        book, pressure = self.book, self.pressure
        decoding, flying = book.decoding, bool(book.flights)
        if flying:
            if self.retries or book.flights[-1].doomed:
                return self.transfers_only()
            book.look_ahead(self.config.max_batch_tokens)
        elif self.retries:
            apart = self._retry()
            if apart:
                return self._issue(False, apart)
        while True:
            tight = bool(book.prefilling.items) and self._anybody_sat_out()
            if tight:
                if flying:
                    return self.transfers_only()
                pressure.relieve()
            overdue = self._find_overdue() if self.overdue or not self.most else []
            chunks: list[Chunk] = []
            if not self.config.mixed and not self._decodes_overdue(overdue):
                self._begin(0)
                self._fill(chunks, [request for request in overdue if not request.decodes], not tight)
                if chunks:
                    return self._issue(False, chunks)
            if decoding.standing and not pressure.grow_decodes():
                if flying:
                    return self.transfers_only()
                pressure.let_sit_out()
                tight = True
            self._begin(decoding.count)
            if self.config.mixed:
                if book.prefilling.items or book.waiting.items:
                    self._fill(chunks, overdue, not tight)
            else:
                self._resume_decodes(chunks, overdue)
            if chunks or decoding.count:
                return self._issue(True, chunks)
            if flying or not pressure.break_deadlock():
                return self.transfers_only()

    def _begin(self, rows: int) -> None:
        self.number = self.book.step + 1
        self.budget = (self.mixed_tokens if rows else self.config.max_batch_tokens) - rows
        if self.budget <= 0:  # as many stream as may be in a step: prompts get on, however slowly
            self.budget = min(self.page, self.config.max_batch_tokens - rows)
        self.copies: list[PageCopy] = []
        if self.config.max_loras:
            self.adapter_cap = AdapterCap(
                self.config.max_loras, self.book.decoding.adapters
            )  # who prefills will decode with them
        self.ahead = -1  # pages that running requests will still take; counted when somebody wants to come in
        self.checkpoints: list[tuple[Lease, int]] = []
        self.pending: set[Request] = set()  # wait for a snapshot that somebody is making

    def _issue(self, decodes: bool, chunks: list[Chunk]) -> Plan:
        book, number = self.book, self.number
        decoding, tables = book.decoding, book.tables
        decodes = decodes and decoding.count > 0
        if self.snapshots:
            self._checkpoint(decodes)
        book.step = number
        flight = PlanInFlight(number, decoding.requests.copy() if decodes else [], decoding.generation, chunks)
        book.flights.append(flight)
        if chunks:
            self._age(decodes, chunks)
            batch = batch_of(decoding if decodes else None, chunks, self.groups)
        else:
            batch = decode_batch(decoding, self.groups)
        if decodes:
            decoding.issued()
        if tables.seated:
            flight.seated = tables.take_seated()
        changes = tables.take_changes()
        plan = Plan(number, batch, tables.arrays, self.copies, [], [], [], [], [], [], None, flight.seated, changes)
        if book.transfers.under_way:
            plan.loads, plan.saves = book.transfers.take()
        if self.config.store:
            plan.lookups, plan.fetches, plan.backups = book.prefetch.take()
        return plan

    def transfers_only(self) -> Plan:
        """Nobody can run now: a plan with the transfers that can, or an empty one."""
        book = self.book
        loads, saves = book.transfers.take()
        lookups, fetches, backups = book.prefetch.take()
        wake_in = book.prefetch.wake_in()
        if not (loads or saves or lookups or fetches or backups):
            return Plan(wake_in=wake_in)
        book.step += 1
        plan = Plan(book.step, tables=book.tables.arrays, loads=loads, saves=saves, wake_in=wake_in)
        plan.lookups, plan.fetches, plan.backups = lookups, fetches, backups
        return plan

    def _anybody_sat_out(self) -> bool:
        return any(request.sat_out for request in self.book.prefilling.items)

    def _checkpoint(self, decodes: bool) -> None:
        """Snapshots are taken last: a slot is worth more to a request that could come in. Decode rows that will fill a
        page leave one there, every few pages."""
        for lease, page in self.checkpoints:
            self.copies += self.cache.checkpoint(lease, page, self.number)
        if not decodes:
            return
        decoding, every = self.book.decoding, self.config.checkpoint_interval
        tick, size = decoding.planned + 1, self.page
        for request in decoding.reaching_page_end():
            page = (request.lead + tick) // size
            if page % every == 0 and request.lease is not None:
                self.copies += self.cache.roll_checkpoint(request.lease, page, self.number)

    def _retry(self) -> list[Chunk]:
        """The next part of a failed step, alone. Whoever has ended or was retracted meanwhile is not in it."""
        while True:
            while self.retries:
                group = [request for request in self.retries[0] if request.lease is not None]
                if group:
                    break
                del self.retries[0]
            else:
                self._begin(0)
                return []
            self.retries[0] = group
            self._begin(0)
            self.adapter_cap = AdapterCap(
                self.config.max_loras, ()
            )  # those who are tried apart do not join the decodes
            chunks: list[Chunk] = []
            if not self.config.mixed:
                group = [request for request in group if request.decodes == group[0].decodes]
            for request in group:
                self._take_part(request, chunks)
            if chunks or not self.pressure.break_deadlock():
                return chunks

    def drop_retried(self, rows: list[Request]) -> None:
        """These have been tried apart. Who belongs to them and found no place in the batch is tried next, and so is who
        has not got beyond where it failed."""
        rest = [request for request in self.retries[0] if request not in rows or request.failed_at >= 0]
        self.retries[:1] = [rest] if rest else []

    # ---- nobody is passed over for ever

    def _find_overdue(self) -> list[Request]:
        """Those that hold memory or wait and were passed over too often, oldest first."""
        self.overdue = [r for r in self.overdue if r.overtaken >= (self.most or 1) and r.phase is not ENDED]
        if not self.most:
            return sorted([*self.book.prefilling.items, *self.book.waiting.items], key=_arrival)
        return sorted([r for r in self.overdue if r.phase in (PREFILLING, WAITING)], key=_arrival)

    def _decodes_overdue(self, overdue: list[Request]) -> bool:
        """Where a batch is of one kind: whether a row that decodes was passed over too often."""
        most = self.most or 1
        return any(r.decodes and r.overtaken >= most for r in overdue) or any(
            r.phase is DECODING and r.overtaken >= most for r in self.overdue
        )

    def _age(self, decodes: bool, chunks: list[Chunk]) -> None:
        """Whoever is ready and has no row in this plan is passed over by everybody later that has its first row."""
        fresh = []
        for chunk in chunks:
            if not chunk.request.ran:
                chunk.request.ran = True
                fresh.append(chunk.request.arrival)
        if not fresh:
            return
        fresh.sort()
        book, number, last, pending = self.book, self.number, fresh[-1], self.pending
        others = [*book.waiting.items, *book.prefilling.items]
        if not decodes:
            others += book.decoding.requests
        for request in others:
            if request.arrival < last and request.step != number and not (pending and request in pending):
                if request.phase is not PREFILLING or len(request.tokens) > 4 * request.position:
                    before = request.overtaken
                    request.overtaken += len(fresh) - bisect_left(fresh, request.arrival)
                    if before < (self.most or 1) <= request.overtaken:
                        self.overdue.append(request)

    # ---- chunks

    def _resume_decodes(self, chunks: list[Chunk], overdue: list[Request]) -> None:
        """Decode rows that sat out, or were tried apart, run again."""
        resuming = [request for request in self.book.prefilling.items if request.decodes]
        for request in [*overdue, *resuming] if overdue else resuming:
            if request.decodes and request.step != self.number:
                self._take_part(request, chunks)

    def _fill(self, chunks: list[Chunk], overdue: list[Request], admitting: bool) -> None:
        """Rows for requests that have something to compute, as far as the budget reaches: first who is overdue; then,
        in mixed batches, decode rows that sat out; then by urgency, and within it first those that hold memory."""
        book = self.book
        self.free = self.config.max_batch_size - book.live if admitting else 0
        self.room: tuple[int, tuple[int, ...]] | None = None
        self.looks = _MAX_MISFITS_PER_PLAN
        for request in overdue:
            if self.budget <= 0:
                break
            if (self.free > 0 or request.lease is not None) and not self._serve(request, chunks):
                if request.adapter is not None and not self.adapter_cap.admits_new(request.adapter):
                    self.adapter_cap.close()
                elif request.lease is None or request.sat_out:
                    self.free = 0  # it does not fit: nobody else comes in
        if self.config.mixed and book.prefilling.items:
            self._resume_decodes(chunks, [])
        staying = [r for r in book.prefilling.items if r.prefills and r.step != self.number]
        coming: Iterable[Request] = ()
        if self.budget > 0 and self.free > 0 and book.waiting.items:
            coming = self._order(book.waiting.items, overdue)
        for request in merge(staying, coming, key=lambda r: (r.priority, r.lease is None)) if staying else coming:
            if self.budget <= 0 or not (self.free > 0 or staying):
                break
            self._serve(request, chunks)

    def _order(self, waiting: list[Request], tried: list[Request]) -> Iterable[Request]:
        """Who is tried first, as the policy says."""
        before = set(tried)
        rest = [request for request in waiting if request not in before] if tried else waiting.copy()
        return self.policy.order(rest, self.most, self._peek)

    def _serve(self, request: Request, chunks: list[Chunk]) -> bool:
        """A row for a request that holds memory; one that waits is let in first, if it can be. False: it is ready, and
        cannot have one."""
        if request.lease is None:
            if self.free <= 0 or self.budget <= 0:
                return True
            if request.adapter is not None and not self.adapter_cap.admits_new(request.adapter):
                return False
            if not self._admit(request):
                if not self.looks:
                    self.free = 0  # enough were looked at
                return request in self.pending
            self.free -= 1
        if request.phase is LOADING or len(request.tokens) == 4 * request.position:
            return True
        return self._take_part(request, chunks)

    def _take_part(self, request: Request, chunks: list[Chunk]) -> bool:
        adapter = request.adapter
        if self.budget <= 0:
            return False
        if adapter is not None and not (
            self.adapter_cap.admits_decoding if request.decodes else self.adapter_cap.admits_new
        )(adapter):
            return False
        chunk = self._chunk(request)
        if chunk is None:
            return False
        chunks.append(chunk)
        if adapter is not None:
            self.adapter_cap.enter(adapter)
        return True

    def _chunk(self, request: Request) -> Chunk | None:
        """The next tokens of a request, as many as the budget and every group can give; None if that is none."""
        cache, lease, page, step = self.cache, request.lease, self.page, self.number
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
            end = self._cut(lease.cuts, start, end)
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
        return _new(Chunk, (request, start, end, end == known_to, write_from))

    def _cut(self, cuts: tuple[int, ...], start: int, end: int) -> int:
        """Where a chunk ends so that a snapshot can be taken."""
        for cut in cuts:
            if start < cut * self.page < end:
                end = cut * self.page
        return end

    # ---- coming in

    def _match(self, request: Request) -> Match:
        if request.reads:
            return self.cache.match_prefix(request.binding, request.tokens, host=request.host)
        return self.cache.match_nothing(request.binding, request.tokens)

    def _peek(self, request: Request) -> int:
        return self._match(request).start

    def _admit(self, request: Request) -> bool:
        """Give a waiting request its memory, if there is enough; if it waits for a snapshot somebody is making, not
        yet."""
        if request.tried is not None and self._hopeless(request):
            return False
        match = self._match(request)
        if match.pending:
            self.pending.add(request)
            return False
        upto = match.start + self.budget
        if upto > match.length:  # a cut does not matter here: what comes behind it needs its pages a step later
            upto = match.length
        want, book = self._want(request), self.book
        keep = _FIRST_RESERVE  # nobody runs: whatever it needs
        if book.owners:  # running requests must be able to go on for a while, and so must this one
            if self.ahead < 0:
                self._count_ahead()
            keep = _new(Reserve, (want, self.ahead, len(book.owners), 1))
        if book.admit(request, match, upto, keep):
            if self.ahead >= 0:
                self.ahead += self._ahead_of(request, want)
            self.room = None
            return True
        if book.owners:
            self.looks -= 1
            request.own = max(0, -(-want // self.page) - match.depth)
            short = request.own + self.ahead > self.cache.room()
            request.tried, request.tried_at = () if short else self.cache.available(), book.step
        return False

    def _hopeless(self, request: Request) -> bool:
        """Whether a request that did not fit a short while ago would not fit now either: told without looking."""
        if not self.book.owners or self.book.step - request.tried_at >= _RETRY_AFTER_PLANS:
            return False
        if self.ahead < 0:
            self._count_ahead()
        if self.room is None:
            self.room = self.cache.room(), self.cache.available()
        pages, each = self.room
        if request.own + self.ahead > pages:
            return True
        tried = request.tried or ()
        return bool(tried) and all(now <= then for now, then in zip(each, tried, strict=True))

    def _want(self, request: Request) -> int:
        """How many tokens a request will have soon."""
        soon = len(request.tokens) // 4 + self.headroom
        return soon if soon < request.final else request.final

    def _count_ahead(self) -> None:
        book = self.book
        self.ahead = book.decoding.room_ahead(self.headroom)
        for other in [*book.prefilling.items, *book.loading.items]:
            self.ahead += self._ahead_of(other, self._want(other))

    def _ahead_of(self, request: Request, want: int) -> int:
        """Pages that a request which does not decode yet will take."""
        assert request.lease is not None
        more = -(-want // self.page) - self.cache.columns(request.lease)
        return more if more > 0 else 0
