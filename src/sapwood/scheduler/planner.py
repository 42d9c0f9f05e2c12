"""Making a plan: which rows grow, which requests compute a chunk, which are admitted. The order of things in one plan:

    0. retries     rows of a step that failed are tried apart from each other, and no other request runs
    1. relief      requests that could not grow in the last plan get room, at the cost of the least urgent
    2. decodes     every decode row gets the page it needs, or sits out
    3. chunks      first requests that were passed over too often, oldest first; then decode rows that sat out; then by
                   urgency, and within it: requests that hold memory and have tokens to compute, then those that wait,
                   each in order of arrival. Each takes what is left of the token budget

While a plan is in flight, the next is made from what is certain (`Book.look_ahead`). Whatever would have a row sit out,
be retracted or be tried again waits until nothing is in flight.

What belongs to one plan alone is in its `PlanBuilder`; here is what outlives it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from heapq import merge
from operator import attrgetter

from .book import Book, PlanInFlight
from .config import SchedulerConfig
from .plan import Plan, batch_of, decode_batch
from .plan_builder import NO_ADAPTER_CAP, AdapterCap, PlanBuilder
from .policy import POLICIES
from .pressure import Pressure
from .request import ENDED, PREFILLING, WAITING, Request

_arrival = attrgetter("arrival")


class Planner:
    def __init__(self, config: SchedulerConfig, book: Book) -> None:
        self.config = config
        self.book = book
        self.cache = book.cache
        self.mixed_tokens = config.mixed_tokens or config.max_batch_tokens
        self.pressure = Pressure(book)
        self.policy = POLICIES[config.policy]()
        self.max_overtaken = config.max_overtaken  # 0: whatever waits or was passed over once is overdue
        self.overdue: list[Request] = []  # requests that have been passed over too often; some have ended since
        self.retries: list[list[Request]] = []  # rows of failed steps, to be tried apart from each other
        self.groups = [group.name for group in self.cache.groups]

    def plan(self) -> Plan:
        """The next plan; empty if no request can run."""
        book, pressure = self.book, self.pressure
        decoding, in_flight = book.decoding, bool(book.flights)
        if in_flight:
            if self.retries or book.flights[-1].doomed:
                return self.transfers_only()
            book.look_ahead(self.config.max_batch_tokens)
        elif self.retries:
            builder = self._retry()
            if builder.chunks:
                return self._issue(builder, False)
        while True:
            tight = bool(book.prefilling.items) and self._any_sat_out()
            if tight:
                if in_flight:
                    return self.transfers_only()
                pressure.relieve()
            overdue = self._find_overdue() if self.overdue or not self.max_overtaken else []
            if decoding.standing and not pressure.grow_decodes():
                if in_flight:
                    return self.transfers_only()
                pressure.let_sit_out()
                tight = True
            builder = self._begin(decoding.count)
            if book.prefilling.items or book.waiting.items:
                self._fill(builder, overdue, not tight)
            if builder.chunks or decoding.count:
                return self._issue(builder, decoding.count > 0)
            if in_flight or not pressure.break_deadlock():
                return self.transfers_only()

    def _begin(self, decodes: int) -> PlanBuilder:
        """A plan in which so many rows decode. With as many of them as a step has tokens, prompts still get on, slowly:
        by a page."""
        most = self.config.max_batch_tokens
        budget = (self.mixed_tokens if decodes else most) - decodes
        if budget <= 0:
            budget = min(self.config.page_size, most - decodes)
        cap = self.config.max_loras  # requests that prefill will decode with the adapters that decode now
        return PlanBuilder(self.book, budget, AdapterCap(cap, self.book.decoding.adapters) if cap else NO_ADAPTER_CAP)

    def _issue(self, builder: PlanBuilder, decodes: bool) -> Plan:
        """The plan goes out, with all decode rows or with none."""
        book, step, chunks = self.book, builder.step, builder.chunks
        decoding, tables = book.decoding, book.tables
        if self.cache.keeps_snapshots:
            self._checkpoint(builder, decodes)
        book.step = step
        flight = PlanInFlight(step, decoding.requests.copy() if decodes else [], decoding.generation, chunks)
        book.flights.append(flight)
        if chunks:
            self._count_overtaken(builder)
            batch = batch_of(decoding if decodes else None, chunks, self.groups)
        else:
            batch = decode_batch(decoding, self.groups)
        if decodes:
            decoding.issued()
        if tables.seated:
            flight.seated = tables.take_seated()
        changes = tables.take_changes()
        plan = Plan(step, batch, tables.arrays, builder.copies, [], [], [], [], [], [], None, flight.seated, changes)
        if book.transfers.under_way:
            plan.loads, plan.saves = book.transfers.take()
        if self.config.store:
            plan.lookups, plan.fetches, plan.backups = book.prefetch.take()
        return plan

    def transfers_only(self) -> Plan:
        """No request can run now: a plan with the transfers that can, or an empty one."""
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

    def _any_sat_out(self) -> bool:
        return any(request.sat_out for request in self.book.prefilling.items)

    def _checkpoint(self, builder: PlanBuilder, decodes: bool) -> None:
        """Snapshots are taken last: a slot is worth more to a request that could be admitted. Decode rows that will
        fill a page leave one there, every few pages."""
        for lease, page in builder.checkpoints:
            builder.copies += self.cache.checkpoint(lease, page, builder.step)
        if not decodes:
            return
        decoding, every = self.book.decoding, self.config.checkpoint_interval
        tick, size = decoding.planned + 1, self.config.page_size
        for request in decoding.reaching_page_end():
            page = (request.lead + tick) // size
            if page % every == 0 and request.lease is not None:
                builder.copies += self.cache.roll_checkpoint(request.lease, page, builder.step)

    # ---- failed steps

    def _retry(self) -> PlanBuilder:
        """The next part of a failed step, alone. Requests that have ended or were retracted meanwhile are not in it,
        and its rows do not join the decodes."""
        while True:
            builder = PlanBuilder(self.book, self.config.max_batch_tokens, AdapterCap(self.config.max_loras, ()))
            while self.retries:
                self.retries[0] = [request for request in self.retries[0] if request.lease is not None]
                if self.retries[0]:
                    break
                del self.retries[0]
            else:
                return builder
            for request in self.retries[0]:
                builder.resume(request)
            if builder.chunks or not self.pressure.break_deadlock():
                return builder

    def drop_retried(self, rows: list[Request]) -> None:
        """These rows have been tried apart. Requests that belong to them and found no place in the batch are tried
        next, and so are those that have not got beyond where they failed."""
        rest = [request for request in self.retries[0] if request not in rows or request.failed_at >= 0]
        self.retries[:1] = [rest] if rest else []

    # ---- no request is passed over for ever

    def _find_overdue(self) -> list[Request]:
        """Requests that hold memory or wait and were passed over too often, oldest first."""
        book, most = self.book, self.max_overtaken
        self.overdue = [r for r in self.overdue if r.overtaken >= (most or 1) and r.phase is not ENDED]
        if not most:
            return sorted([*book.prefilling.items, *book.waiting.items], key=_arrival)
        return sorted([r for r in self.overdue if r.phase in (PREFILLING, WAITING)], key=_arrival)

    def _count_overtaken(self, builder: PlanBuilder) -> None:
        """A request that is ready and has no row in this plan is passed over by every later one that has its first."""
        first_rows = []
        for chunk in builder.chunks:
            if not chunk.request.ran:
                chunk.request.ran = True
                first_rows.append(chunk.request.arrival)
        if not first_rows:
            return
        first_rows.sort()
        book, step, pending, most = self.book, builder.step, builder.pending, self.max_overtaken or 1
        last = first_rows[-1]
        for request in [*book.waiting.items, *book.prefilling.items]:
            if request.arrival < last and request.step != step and not (pending and request in pending):
                if request.phase is not PREFILLING or len(request.tokens) > 4 * request.position:
                    before = request.overtaken
                    request.overtaken += len(first_rows) - bisect_left(first_rows, request.arrival)
                    if before < most <= request.overtaken:
                        self.overdue.append(request)

    # ---- chunks

    def _fill(self, builder: PlanBuilder, overdue: list[Request], admitting: bool) -> None:
        """Rows for requests that have something to compute, as far as the budget reaches."""
        book = self.book
        if admitting:
            builder.free_places = self.config.max_batch_size - book.live
        for request in overdue:
            if builder.budget <= 0:
                break
            if (builder.free_places > 0 or request.lease is not None) and not builder.serve(request):
                builder.give_way_to(request)
        prefilling = book.prefilling.items
        staying: list[Request] = []
        if prefilling:
            for request in [request for request in prefilling if request.decodes and request.step != builder.step]:
                builder.resume(request)
            staying = [r for r in prefilling if r.prefills and r.step != builder.step]
        coming: Iterable[Request] = ()
        if builder.budget > 0 and builder.free_places > 0 and book.waiting.items:
            coming = self._in_policy_order(book.waiting.items, overdue)
        for request in merge(staying, coming, key=lambda r: (r.priority, r.lease is None)) if staying else coming:
            if builder.budget <= 0 or not (builder.free_places > 0 or staying):
                break
            builder.serve(request)

    def _in_policy_order(self, waiting: list[Request], overdue: list[Request]) -> Iterable[Request]:
        """Waiting requests, without those that were tried as overdue ones, as the policy has them."""
        before = set(overdue)
        rest = [request for request in waiting if request not in before] if overdue else waiting.copy()
        return self.policy.order(rest, self.max_overtaken, lambda request: self.book.match(request).start)
