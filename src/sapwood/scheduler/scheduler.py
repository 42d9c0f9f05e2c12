"""`Scheduler`: the whole engine interface. submit, next_plan, advance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from sapwood.cache import Explanation, HybridPrefixCache, KVEvent, Namespace

from .book import Book
from .config import SchedulerConfig
from .events import (
    Abort,
    BackupDone,
    Ended,
    Event,
    FetchDone,
    Finish,
    LoadDone,
    LookupDone,
    ProtocolError,
    SaveDone,
    StepDone,
    StepFailed,
    StoreUp,
    Tick,
)
from .outcome import Outcome
from .plan import Plan
from .planner import Planner
from .request import DECODING, PREFILLING, Refused, Request, RequestSpec, checked


class Scheduler:
    """Decides, step by step, which requests compute what, with which memory. Deterministic: no clock, no randomness.

    scheduler.submit(specs)
    plan = scheduler.next_plan()
    ended = scheduler.advance(executor.execute(plan))
    """

    def __init__(self, config: SchedulerConfig) -> None:
        if not isinstance(config, SchedulerConfig):
            raise ValueError(f"config must be a SchedulerConfig, got {config!r:.60}")
        self.config = config
        self._book = Book(config)
        self._planner = Planner(config, self._book)
        self._outcome = Outcome(config, self._book, self._planner)
        self._arrivals = 0
        self._on_eviction = config.host_policy == "evict"

    @property
    def cache(self) -> HybridPrefixCache:
        return self._book.cache

    def submit(self, specs: Sequence[RequestSpec]) -> None:
        """Take these requests, in this order; or none of them, with Refused for the first that cannot be taken."""
        book = self._book
        if isinstance(specs, RequestSpec):
            raise ValueError("submit takes a list of RequestSpec, got one RequestSpec")
        taken: dict[str, bytes] = {}
        specs = list(specs)
        for spec in specs:
            tokens = checked(spec, book.cache, self.config.max_columns)
            if spec.id in taken or spec.id in book.requests:
                raise Refused(spec.id, "a request with this id is live; an id can be used again after its Ended")
            taken[spec.id] = tokens
        for spec in specs:
            self._arrivals += 1
            request = Request(spec, taken[spec.id], self._arrivals, book.cache.bind(spec.namespace))
            book.requests[spec.id] = request
            book.waiting.add(request)
            if self.config.store:
                book.prefetch.arrives(request)
        book.counts["submitted"] += len(specs)

    def next_plan(self) -> Plan:
        """What to do next. Empty while as many plans are in flight as may be, and when there is nothing to do."""
        book = self._book
        if len(book.flights) > self.config.overlap:
            plan = Plan()
        else:
            if book.prefetch.fresh:
                book.prefetch.look()
            if book.prefetch.claims.changed:
                book.prefetch.claims.look_again()
            if book.prefetch.owed:
                book.prefetch.offer_again()
            if self._on_eviction:
                book.transfers.save_cold()
            plan = self._planner.plan() if book.requests else self._planner.transfers_only()
        if book.ended:
            plan.ended = book.take_ended()
        return plan

    def advance(self, events: Sequence[Event]) -> list[Ended]:
        """What has happened, in order. Returns the requests that are over. ProtocolError for an event that cannot
        happen: it changes nothing; those before it have been applied, and their ends are told by the next call."""
        for event in events:
            self._apply(event)
        return self._book.take_ended()

    def _apply(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._outcome.done(event)
        elif isinstance(event, StepFailed):
            self._outcome.failed(event)
        elif isinstance(event, Abort):
            request = self._book.requests.get(event.id)
            if request is not None:
                self._book.end(request, "abort")
        elif isinstance(event, Finish):
            self._finish(event)
        elif isinstance(event, LoadDone):
            self._book.landed(self._book.transfers.load_done(event))
        elif isinstance(event, SaveDone):
            self._book.prefetch.back_up(self._book.transfers.save_done(event))
        elif isinstance(event, LookupDone):
            self._book.prefetch.lookup_done(event)
        elif isinstance(event, FetchDone):
            self._book.prefetch.fetch_done(event)
        elif isinstance(event, BackupDone):
            self._book.prefetch.backup_done(event)
        elif isinstance(event, Tick):
            if type(event.n) is not int or event.n < 0:
                raise ProtocolError(f"Tick: n must be an integer from 0 on, got {event.n!r:.40}")
            self._book.prefetch.tick(event.n)
        elif isinstance(event, StoreUp):
            if type(event.up) is not bool:
                raise ProtocolError(f"StoreUp: up must be True or False, got {event.up!r:.40}")
            self._book.prefetch.store_is(event.up)
        else:
            raise ProtocolError(f"advance takes events of sapwood.scheduler, got {event!r:.60}")

    def _finish(self, event: Finish) -> None:
        request = self._book.requests.get(event.id)
        if request is None:
            return
        if not self._book.generated(request):
            raise ProtocolError(
                f"Finish cannot happen to request {request.id!r:.80} while it is {request.phase}: "
                "it has yielded no token yet"
            )
        self._book.end(request, "finish")

    def evict_namespace(self, namespace: Namespace) -> bool:
        """Forget what is cached of a namespace on device and host; a store keeps what it has. Requests bound to it end
        under it. Returns whether there was any."""
        return self.cache.evict_namespace(namespace)

    def brought(self, id: str) -> tuple[int, int]:
        """Of the prompt tokens that a request did not compute: how many were loaded from host memory for it, and how
        many of these came from the store. What `Ended` says of it in the end."""
        request = self._book.requests.get(id)
        if request is None:
            return 0, 0
        loaded = min(request.loaded, request.cached)
        return loaded, min(request.fetched, loaded)

    def found(self, id: str) -> Explanation | None:
        """What admission found of a request's prompt: why no more of it is served, and how much was real. None: the
        request is not there, or was not admitted yet."""
        request = self._book.requests.get(id)
        return None if request is None else request.binding.found

    def offer_owed(self) -> bool:
        """The engine is about to end: what the store has not got, and could not keep before, goes out with the next
        plan, without a pause. False if nothing does: nothing is owed, or the store does not answer."""
        return self._book.prefetch.offer_all()

    def unwritten(self) -> dict[str, int]:
        """By group, how many pages a store would get if this went on: what is owed, and what no plan has handed out."""
        book = self._book
        pages = Counter(book.prefetch.unwritten())
        for save in book.transfers.saves if self.config.store else ():
            pages.update({name: int(np.count_nonzero(targets)) for name, (_, targets) in save.pages.items()})
        return dict(pages)

    def flush(self) -> None:
        """Forget everything that is cached."""
        self.cache.flush()

    def drain_events(self) -> list[KVEvent]:
        """KV events since the last call."""
        return self.cache.drain_events()

    def adapters(self) -> dict[str, dict[bytes, int]]:
        """How many live requests have which adapter: of those that are computed, and of those that wait for it."""
        found: dict[str, dict[bytes, int]] = {"running": {}, "waiting": {}}
        for request in self._book.requests.values():
            if request.adapter is not None:
                some = found["running" if request.phase in (PREFILLING, DECODING) else "waiting"]
                some[request.adapter] = some.get(request.adapter, 0) + 1
        return found

    def stats(self) -> dict[str, Any]:
        """Requests by state, what was done so far, and the cache's own figures under "cache"."""
        book = self._book
        return {
            "waiting": len(book.waiting),
            "fetching": book.prefetch.waiters,
            "loading": len(book.loading),
            "prefilling": len(book.prefilling),
            "decoding": book.decoding.count,
            "transfers": len(book.transfers.under_way),
            "store": book.prefetch.stats(),
            **book.counts,
            **self._outcome.counts,
            "cache": self.cache.stats(),
        }
