"""Making a plan: who grows, who computes which chunk, who comes in. The order of things in one plan:

    1. relief      who could not grow in the last plan gets room, at the cost of the least urgent
    2. decodes     every decode row gets the page it needs, or sits out
    3. chunks      by urgency, and within it: requests that hold memory and have tokens to compute, then those that
                   wait, each in order of arrival; each takes what is left of the token budget

With `mixed=False` chunks come first, and decodes only if there are none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from heapq import merge
from itertools import chain

from sapwood.cache import Keep, Lease, Match, PageCopy

from .adapters import Gate
from .book import Book, Flight
from .config import SchedulerConfig
from .plan import Chunk, Plan, batch_of, decode_batch
from .policy import POLICIES
from .pressure import Pressure
from .request import LOADING, Request

_new = tuple.__new__  # a NamedTuple in a third of the time
_FIRST = Keep(least=1)
_LOOKS = 8  # requests that turn out not to fit, after which a plan looks at nobody else
_LOOK_AGAIN = 16  # plans after which a request that did not fit is tried again although no room was made


class Planner:
    def __init__(self, config: SchedulerConfig, book: Book) -> None:
        self.config = config
        self.book = book
        self.cache = book.cache
        self.page = config.page_size
        self.headroom = config.headroom
        self.snapshots = self.cache.keeps_snapshots
        self.pressure = Pressure(book)
        self.policy = POLICIES[config.policy]()
        self.step = 0
        self.gate = Gate(0, ())
        self.retries: list[list[Request]] = []  # rows of failed steps, to be tried apart from each other
        self.groups = [group.name for group in self.cache.groups]

    def plan(self) -> Plan:
        """The next plan; empty if nobody can run."""
        if self.retries:
            apart = self._retry()
            if apart:
                return self._issue(False, apart)
        book = self.book
        decoding = book.decoding
        while True:
            tight = bool(book.prefilling.items) and self._anybody_sat_out()
            if tight:
                self.pressure.relieve()
            chunks: list[Chunk] = []
            if self.config.mixed:
                if decoding.standing:
                    tight |= self.pressure.grow_decodes()
                self._begin(decoding.count)
                if book.prefilling.items:
                    self._resume_decodes(chunks)
                if book.prefilling.items or book.waiting.items:
                    self._prefill(chunks, not tight)
            else:
                self._begin(0)
                self._prefill(chunks, not tight)
                if chunks:
                    return self._issue(False, chunks)
                self.pressure.grow_decodes()
                self._begin(decoding.count)
                self._resume_decodes(chunks)
            if chunks or decoding.count:
                return self._issue(True, chunks)
            if not self.pressure.break_deadlock():
                return self.transfers_only()

    def _begin(self, rows: int) -> None:
        self.number = self.step + 1
        self.budget = self.config.max_batch_tokens - rows
        self.copies: list[PageCopy] = []
        if self.config.max_loras:
            self.gate = Gate(self.config.max_loras, self.book.decoding.adapters)  # who prefills will decode with them
        self.ahead = -1  # pages that running requests will still take; counted when somebody wants to come in
        self.checkpoints: list[tuple[Lease, int]] = []

    def _issue(self, decodes: bool, chunks: list[Chunk]) -> Plan:
        book = self.book
        rows = book.decoding.requests if decodes else []
        if self.snapshots:
            self._checkpoint(decodes)
        step = self.step = self.number
        book.flight = Flight(step, rows.copy(), chunks)
        if chunks:
            batch = batch_of(book.decoding if decodes else None, chunks, self.groups)
        else:
            batch = decode_batch(book.decoding, self.groups)
        plan = Plan(step, batch, book.tables.arrays, self.copies, [], [], [], [], [], [])
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
        self.step += 1
        plan = Plan(self.step, tables=book.tables.arrays, loads=loads, saves=saves, wake_in=wake_in)
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
        tick, size = decoding.tick + 1, self.page
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
            self.gate = Gate(self.config.max_loras, ())  # those who are tried apart do not join the decodes
            chunks: list[Chunk] = []
            for request in group:
                self._take_part(request, chunks)
            if chunks or not self.pressure.break_deadlock():
                return chunks

    def tried(self, rows: list[Request]) -> None:
        """These were tried apart. Who belongs to them and found no place in the batch is tried next."""
        rest = [request for request in self.retries[0] if request not in rows]
        self.retries[:1] = [rest] if rest else []

    # ---- chunks

    def _resume_decodes(self, chunks: list[Chunk]) -> None:
        """Decode rows that sat out, or were tried apart, run again."""
        for request in [request for request in self.book.prefilling.items if request.decodes]:
            self._take_part(request, chunks)

    def _prefill(self, chunks: list[Chunk], admitting: bool) -> None:
        """Rows for requests that have more to compute, as far as the budget reaches: within a priority first those
        that hold memory, then those that wait."""
        book = self.book
        if self.budget <= 0 or not (book.prefilling.items or (admitting and book.waiting.items)):
            return
        staying = [request for request in book.prefilling.items if not request.decodes]
        free = self.config.max_batch_size - book.live
        coming: Iterable[Request] = ()
        if admitting and free > 0 and book.waiting.items:
            coming = self._order(book.waiting.items)
        self.room: tuple[int, tuple[int, ...]] | None = None
        self.looks = _LOOKS
        admitted: list[Request] = []
        for request in merge(staying, coming, key=lambda r: (r.priority, r.lease is None)) if staying else coming:
            if self.budget <= 0 or not (free or staying):
                break
            if request.lease is None:
                if not free:
                    continue
                if request.adapter is not None and not self.gate.lets_in(request.adapter):
                    if request.overtaken >= self.config.max_overtaken:
                        self.gate.close()
                    continue
                if not self._admit(request):
                    if request.overtaken >= self.config.max_overtaken or not self.looks:
                        free = 0  # it has been overtaken often enough, or enough were looked at: nobody else comes in
                    continue
                free -= 1
                admitted.append(request)
                if request.phase is LOADING:
                    continue
            self._take_part(request, chunks)
        if admitted:
            self._age(admitted)

    def _order(self, waiting: list[Request]) -> Iterable[Request]:
        """Who is tried first: those overtaken too often, whatever their urgency; then as the policy says."""
        most = self.config.max_overtaken
        overdue = [request for request in waiting if request.overtaken >= most]
        rest = [request for request in waiting if request.overtaken < most] if overdue else waiting.copy()
        ordered = self.policy.order(rest, most, self._peek)
        return chain(overdue, ordered) if overdue else ordered

    def _take_part(self, request: Request, chunks: list[Chunk]) -> None:
        adapter = request.adapter
        if self.budget <= 0 or (adapter is not None and not self.gate.lets_in(adapter)):
            return
        chunk = self._chunk(request)
        if chunk is not None:
            chunks.append(chunk)
            if adapter is not None:
                self.gate.enter(adapter)

    def _chunk(self, request: Request) -> Chunk | None:
        """The next tokens of a request, as many as the budget and every group can give; None if that is none."""
        cache, lease, page, step = self.cache, request.lease, self.page, self.number
        assert lease is not None
        if request.reads and request.position < lease.length - 1 and lease.opened:
            known = request.tokens if len(request.tokens) == 4 * lease.length else request.tokens[: 4 * lease.length]
            request.begins_at(cache.adopt(lease, known, request.position))
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
            return False
        upto = match.start + self.budget
        if upto > match.length:  # a cut does not matter here: what comes behind it needs its pages a step later
            upto = match.length
        want, book = self._want(request), self.book
        keep = _FIRST  # nobody runs: whatever it needs
        if book.owners:  # running requests must be able to go on for a while, and so must this one
            if self.ahead < 0:
                self._count_ahead()
            keep = _new(Keep, (want, self.ahead, len(book.owners), 1))
        if book.admit(request, match, upto, keep):
            if self.ahead >= 0:
                self.ahead += self._ahead_of(request, want)
            self.room = None
            return True
        if book.owners:
            self.looks -= 1
            request.own = max(0, -(-want // self.page) - match.depth)
            short = request.own + self.ahead > self.cache.room()
            request.tried, request.tried_at = () if short else self.cache.available(), self.step
        return False

    def _hopeless(self, request: Request) -> bool:
        """Whether a request that did not fit a short while ago would not fit now either: told without looking."""
        if not self.book.owners or self.step - request.tried_at >= _LOOK_AGAIN:
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

    def _age(self, admitted: list[Request]) -> None:
        """Whoever came before one of these, and still waits, has been overtaken."""
        arrivals = sorted([request.arrival for request in admitted])
        for request in self.book.waiting.items:
            if request.arrival < arrivals[-1]:
                request.overtaken += len(arrivals) - bisect_left(arrivals, request.arrival)
