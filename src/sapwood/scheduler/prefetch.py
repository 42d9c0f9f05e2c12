"""The store: what a new request lacks is looked up there, fetched to host, and found there by its admission.

    submit --- enough is missing here ---> lookup ---> enough is there ---> fetch ---> lands on host
                      |                    |    ^             |               |
                      |                    |    +-- fewer? ---+ host is       |
                      |                    |                    too small     |
                      +------- else -------+---- too late, failed: -----------+----> the request waits to come in

A request that is fetching holds nothing of the device; requests behind it go on. An operation belongs to the cache, not
to the requests that wait for it: they may end or time out, and it still keeps its pages until its event comes. What it
brings stays on host for them until they come in (`Claims`). What host has been given is backed up, and offered again
where that failed (`backup_retries.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from sapwood.cache import Binding, HybridPrefixCache, Namespace, Span, StoreOperation

from .backup_retries import BackupRetries
from .config import SchedulerConfig
from .events import BackupDone, FetchDone, LookupDone, ProtocolError
from .request import WAITING, Queue, Request

_NEVER = 1 << 62  # while an operation waits for its plan
_MAX_CLAIMS_PER_PLAN = 8  # claims looked at again before a plan: a walk of the tree each


class Lookup(NamedTuple):
    """Ask the store: how many of these pages, from the first on, could it serve? (`cache.servable_run` knows what
    that takes of each group.)"""

    op: int
    namespace: Namespace
    start_page: int
    hashes: list[bytes]


class _Claim:
    __slots__ = ("pin", "short", "tries", "upto")

    def __init__(self, upto: int) -> None:
        self.upto = upto  # pages of the prompt
        self.pin = 0  # its number in the cache; 0: nothing is held
        self.short = False  # the limit allows no more
        self.tries = 0


class Claims:
    """What was fetched for a request that waits stays on host until it comes in. Which request has how much is decided
    here; the cache holds the pages, and only so many for all claims together. Claims go by the order of the queue: an
    earlier request may take those of later ones, and what is let go of is given to claims that have too little, before
    the next plan."""

    def __init__(self, cache: HybridPrefixCache) -> None:
        self.cache = cache
        self.of: dict[Request, _Claim] = {}
        self.changed = False  # pages were let go of, or host got some: claims that lack pages may find them

    @property
    def held(self) -> int:
        """How many requests have pages that stay on host."""
        return sum([claim.pin > 0 for claim in self.of.values()])

    def make(self, request: Request, upto: int) -> None:
        """Host has the first `upto` pages of its prompt, and is to have them when it comes in."""
        self.drop(request)
        claim = self.of[request] = _Claim(upto)
        self._hold(request, claim)
        taken: list[Request] = []
        while claim.short and (other := self._last_behind(request)) is not None:
            taken.append(other)
            self._let_go(self.of[other])
            self._hold(request, claim)
        for other in reversed(taken):  # what it did not need after all
            self._hold(other, self.of[other])

    def drop(self, request: Request) -> None:
        """It has come in, where a load or its lease holds what it needs; or it is over."""
        claim = self.of.pop(request, None)
        if claim is not None:
            self._let_go(claim)
            self.changed = True

    def look_again(self) -> None:
        """Before a plan: claims that have too little may get more now."""
        self.changed = False
        lacking = [(claim.tries, request.key, request) for request, claim in self.of.items() if _lacks(claim)]
        for _, _, request in sorted(lacking)[:_MAX_CLAIMS_PER_PLAN]:
            self.of[request].tries += 1
            self._hold(request, self.of[request])

    def _hold(self, request: Request, claim: _Claim) -> None:
        self._let_go(claim)
        claim.pin, claim.short = self.cache.pin_on_host(request.binding, request.tokens, claim.upto)

    def _let_go(self, claim: _Claim) -> None:
        self.cache.unpin_on_host(claim.pin)
        claim.pin, claim.short = 0, True

    def _last_behind(self, request: Request) -> Request | None:
        """Of the requests behind it in the queue, the last one that has a pin."""
        behind = [other for other, claim in self.of.items() if claim.pin and other.key > request.key]
        return max(behind, key=lambda other: other.key, default=None)


def _lacks(claim: _Claim) -> bool:
    return claim.short or not claim.pin


class _Search:
    """One lookup, and then perhaps one fetch, for all requests that lack the same pages."""

    __slots__ = ("cut", "deadline", "first", "hashes", "left", "pages", "seeker", "waiters")

    def __init__(self, seeker: Request, first: int, hashes: list[bytes]) -> None:
        self.seeker = seeker  # whose prompt it is
        self.first = first
        self.hashes = hashes
        self.deadline = _NEVER
        self.cut = False  # it asks again, for what host can take
        self.pages = 0  # that are fetched, once they are
        self.waiters: dict[Request, bool] = {}  # whether each has looked before, and joined another search then
        self.left: list[Request] = []  # waited too long; what comes is of use to those that still wait by then


class Prefetch:
    def __init__(self, config: SchedulerConfig, cache: HybridPrefixCache, waiting: Queue) -> None:
        self.config = config
        self.cache = cache
        self.waiting = waiting
        self.claims = Claims(cache)
        self.ticks = 0
        self.up = True  # whether the store answers
        self.fresh: list[Request] = []  # new requests, for which nothing was looked up yet
        self.lookups: list[Lookup] = []  # for the next plan
        self.fetches: list[StoreOperation] = []
        self.backups: list[StoreOperation] = []
        self.looking: dict[int, _Search] = {}  # by operation
        self.fetching: dict[int, _Search] = {}
        self.backing: set[int] = set()
        self.owed = BackupRetries()
        self.by_hash: dict[bytes, _Search] = {}  # by the first missing page
        self.seeking: dict[Request, _Search] = {}  # what each request waits for
        self.counts = {"lookups": 0, "joined": 0, "hits": 0, "shortened": 0, "late": 0}

    @property
    def waiters(self) -> int:
        """How many requests wait for the store."""
        return len(self.seeking)

    def stats(self) -> dict[str, int]:
        """Operations under way, and what was done so far."""
        under_way = {"looking": len(self.looking), "fetching": len(self.fetching), "backing": len(self.backing)}
        waiting = {"staying": self.claims.held, "owed": len(self.owed)}
        return {**under_way, **waiting, **self.counts, **self.owed.counts}

    # ---- plans

    def arrives(self, request: Request) -> None:
        if request.reads:
            self.fresh.append(request)

    def look(self) -> None:
        """Before a plan: look up what requests lack that came since the last one."""
        fresh, self.fresh = self.fresh, []
        for request in fresh:
            if request.phase is WAITING:
                self._look_for(request, False)

    def _look_for(self, request: Request, again: bool) -> None:
        if not self.up:
            return
        missing = self.cache.missing(request.binding, request.tokens, self.config.prefetch_threshold)
        if missing is None:
            return
        search = self.by_hash.get(missing.hashes[0])
        if search is not None and search.seeker.binding.attached:
            self.counts["joined"] += 1
        else:
            search = self.by_hash[missing.hashes[0]] = _Search(request, missing.first, missing.hashes)
            self._look_up(search)
        self.waiting.remove(request)
        request.change_phase("looking in the store")
        search.waiters[request] = again
        self.seeking[request] = search

    def _look_up(self, search: _Search) -> None:
        op = self.cache.next_op()
        self.looking[op] = search
        self.lookups.append(Lookup(op, search.seeker.binding.namespace, search.first, search.hashes))
        self.counts["lookups"] += 1
        search.deadline = _NEVER

    def take(self) -> tuple[list[Lookup], list[StoreOperation], list[StoreOperation]]:
        """Lookups, fetches and backups to hand out with a plan."""
        for lookup in self.lookups:  # patience begins now
            self.looking[lookup.op].deadline = self.ticks + self.config.lookup_ticks
        for fetch in self.fetches:
            search = self.fetching[fetch.op]
            search.deadline = self.ticks + self.config.fetch_patience(search.pages)
        taken = self.lookups, self.fetches, self.backups
        self.lookups, self.fetches, self.backups = [], [], []
        return taken

    def wake_in(self) -> int | None:
        """Ticks until a request has waited long enough, or a span can be offered to the store again; None if there is
        neither."""
        deadlines = [search.deadline for search in self.seeking.values()]
        wakes = [max(1, min(deadlines) - self.ticks)] if deadlines else []
        again = self.owed.wake_in(self.ticks) if self.up else None
        if again is not None:
            wakes.append(again)
        return min(wakes, default=None)

    # ---- events

    def tick(self, n: int) -> None:
        """Time passes. A request that has waited long enough computes; the operation goes on and keeps what it has."""
        self.ticks += n
        if not self.seeking:
            return
        for search in list(dict.fromkeys(self.seeking.values())):
            if search.deadline <= self.ticks:
                self.counts["late"] += 1
                search.left = list(search.waiters)
                self._over(search)

    def store_is(self, up: bool) -> None:
        """The store answers, or does not."""
        self.up = up
        if up:
            self.owed.resume(self.ticks)

    def lookup_done(self, event: LookupDone) -> None:
        search = self.looking.get(event.op)
        if search is None or any(lookup.op == event.op for lookup in self.lookups):
            raise ProtocolError(f"LookupDone: no lookup with number {event.op!r:.40} is under way")
        self._pages(event, len(search.hashes))
        del self.looking[event.op]
        binding = self._asking(search)
        if event.pages < self.config.prefetch_threshold or binding is None:
            self._over(search, search.first + event.pages)
            return
        tokens, first, pages = search.seeker.tokens, search.first, event.pages
        fits = self.cache.fetchable_run(binding, tokens, first, first + pages)
        if self.config.prefetch_threshold <= fits < pages:
            if self.cache.cuts_anywhere:
                pages = fits
            elif not search.cut:
                self._look_up_fewer(search, fits)
                return
        operation = self.cache.begin_fetch(binding, tokens, first, first + pages, search.hashes[:pages])
        if operation is None:
            self._over(search, first + event.pages)
            return
        search.pages = pages
        search.deadline = _NEVER
        self.fetching[operation.op] = search
        self.fetches.append(operation)
        self.counts["hits"] += 1
        self.counts["shortened"] += search.cut or pages < event.pages

    @staticmethod
    def _asking(search: _Search) -> Binding | None:
        """The binding of a request that waits and could find what comes. The first seeker may have ended meanwhile."""
        return next((request.binding for request in search.waiters if request.binding.attached), None)

    def _look_up_fewer(self, search: _Search, pages: int) -> None:
        """Host cannot take what the store has. Where, within what it can take, could every group be served?"""
        search.cut = True
        search.hashes = search.hashes[:pages]
        self._look_up(search)

    def fetch_done(self, event: FetchDone) -> None:
        search = self.fetching.get(event.op)
        if search is None or any(fetch.op == event.op for fetch in self.fetches):
            raise ProtocolError(f"FetchDone: no fetch with number {event.op!r:.40} is under way")
        self._ok(event)
        self._pages(event, search.pages)
        del self.fetching[event.op]
        waiting = [*search.waiters, *(request for request in search.left if request.phase is WAITING and request.host)]
        wanted = bool(waiting) or event.pages == search.pages  # a part of it is of use to waiting requests alone
        landed = self.cache.fetch_done(event.op, event.ok and wanted, event.pages)
        reached = search.first + event.pages if landed else 0
        for request in sorted(waiting, key=attrgetter("key")) if reached else ():
            request.fetched = event.pages * self.cache.page_size
            self.claims.make(request, reached)
        self._over(search, reached)

    def back_up(self, span: Span | None) -> None:
        """Host has these pages now: back them up to the store."""
        if not self.config.store or span is None:
            return
        self.claims.changed = True
        if self.up:
            self._begin_backups(span)
        else:
            self.owed.add(span, self.ticks)

    def offer_again(self) -> None:
        """Before a plan: some of what the store has not got, if it answers. What has left host meanwhile, or whose
        namespace is gone, is not there to be begun."""
        if self.up:
            for entry in self.owed.due(self.ticks):
                for op in self._begin_backups(entry.span):
                    self.owed.tries(op, entry.tries)

    def offer_all(self) -> bool:
        """All of it goes out with the next plan, if the store answers. False if nothing does."""
        entries = self.owed.take_all() if self.up else []
        for entry in entries:
            for op in self._begin_backups(entry.span):
                self.owed.tries(op, 0)  # it is not given up for being refused now
        return bool(entries)

    def unwritten(self) -> dict[str, int]:
        """By group, how many pages host has of what is owed, or was not handed out."""
        pages = {(name, hash) for each in self.backups for name, hash in _parts_of(each)}
        for span in self.owed.spans():
            for operation in self.cache.begin_backups(span):
                self.cache.backup_done(operation.op, False)
                pages.update(_parts_of(operation))
        return Counter(name for name, _ in pages)

    def _begin_backups(self, span: Span) -> list[int]:
        begun = self.cache.begin_backups(span)
        ops = [operation.op for operation in begun]
        self.backing.update(ops)
        self.backups += begun
        return ops

    def backup_done(self, event: BackupDone) -> None:
        if event.op not in self.backing or any(backup.op == event.op for backup in self.backups):
            raise ProtocolError(f"BackupDone: no backup with number {event.op!r:.40} is under way")
        self._ok(event)
        self.backing.remove(event.op)
        span = self.cache.backup_done(event.op, event.ok)
        if event.ok:
            self.owed.got_through(event.op)
        else:
            self.owed.failed(event.op, span, self.ticks)

    # ---- requests that wait

    def forget(self, request: Request) -> None:
        """A request that was fetching is over. What is under way for it goes on."""
        search = self.seeking.pop(request)
        del search.waiters[request]
        if not search.waiters:
            self._leave(search)

    def _over(self, search: _Search, reached: int = 0) -> None:
        """All requests that waited for it are waiting again, at their old places in the queue. One that had joined, and
        whose prompt parts from the seeker's at page `reached` or before, has not asked for its own pages yet: it does
        so now, once."""
        self._leave(search)
        waiters, search.waiters = search.waiters, {}
        for request in waiters:
            del self.seeking[request]
            request.change_phase("the store's last word")
            self.waiting.add(request)
        for request, again in waiters.items() if reached else ():
            if (
                request is not search.seeker
                and not again
                and self._parts(request.tokens, search.seeker.tokens, reached)
            ):
                self._look_for(request, True)

    def _parts(self, ours: bytes, theirs: bytes, reached: int) -> bool:
        """Whether a prompt goes on with pages of its own, from page `reached` or an earlier one on."""
        size = 4 * self.config.page_size
        common = min(len(ours), len(theirs))
        differ = (np.frombuffer(ours, np.int32, common // 4) != np.frombuffer(theirs, np.int32, common // 4)).nonzero()[
            0
        ]
        page = (4 * int(differ[0]) if len(differ) else common) // size
        return page <= reached and page < len(ours) // size

    def _leave(self, search: _Search) -> None:
        if self.by_hash.get(search.hashes[0]) is search:
            del self.by_hash[search.hashes[0]]

    @staticmethod
    def _ok(event: FetchDone | BackupDone) -> None:
        if not isinstance(event.ok, bool):
            raise ProtocolError(f"{type(event).__name__}: ok must be True or False, got {event.ok!r:.40}")

    @staticmethod
    def _pages(event: LookupDone | FetchDone, most: int) -> None:
        if type(event.pages) is not int or not 0 <= event.pages <= most:
            raise ProtocolError(
                f"{type(event).__name__}: pages must be an integer from 0 to {most}, got {event.pages!r:.40}"
            )


def _parts_of(operation: StoreOperation) -> Iterator[tuple[str, bytes]]:
    """The pages that an operation has to do with: group and hash."""
    for name, ids in operation.pages.items():
        for at in np.flatnonzero(ids).tolist():
            yield name, operation.hashes[at]
