"""Transfers between tiers: begun in the cache, carried out by the executor, over when its event says so.

What a transfer reads and writes belongs to it until then (the cache sees to that); so a plan may hand out transfers of
requests that have ended, and an event may come at any time.
"""

from __future__ import annotations

from collections.abc import Iterable

from sapwood.cache import HybridPrefixCache, Landed, Operation, Span

from .events import LoadDone, ProtocolError, SaveDone

_MAX_COLD_SAVES = 8  # transfers under way at most, if pages are saved only before they are evicted


class Transfers:
    def __init__(self, cache: HybridPrefixCache, through: bool) -> None:
        self.cache = cache
        self.through = cache.has_host and (through or not cache.foresees_eviction)
        self.loads: list[Operation] = []  # for the next plan
        self.saves: list[Operation] = []
        self.under_way: dict[int, str] = {}

    @property
    def pending(self) -> bool:
        """Whether an event will come that may free memory or let a request go on."""
        return bool(self.under_way)

    def offer(self, spans: Iterable[Span | None]) -> None:
        """Pages that are real now: write them through to host, unless that is only done on eviction."""
        if not self.through:
            return
        for span in spans:
            if span is not None:
                self._save(span)

    def save_cold(self) -> None:
        """Save only what would be lost: before every plan, a few of the pages that eviction will take next."""
        if self.through or not self.cache.has_host or len(self.under_way) >= _MAX_COLD_SAVES:
            return
        for span in self.cache.cold_spans(_MAX_COLD_SAVES - len(self.under_way)):
            self._save(span)

    def _save(self, span: Span) -> None:
        operation = self.cache.begin_save(span)
        if operation is not None:
            self.under_way[operation.op] = "save"
            self.saves.append(operation)

    def load(self, operation: Operation | None) -> None:
        if operation is not None:
            self.under_way[operation.op] = "load"
            self.loads.append(operation)

    def take(self) -> tuple[list[Operation], list[Operation]]:
        """Loads and saves to hand out with a plan."""
        loads, saves = self.loads, self.saves
        self.loads, self.saves = [], []
        return loads, saves

    def load_done(self, event: LoadDone) -> Landed:
        self._over(event, "load")
        return self.cache.load_done(event.op, event.ok)

    def save_done(self, event: SaveDone) -> Span | None:
        self._over(event, "save")
        return self.cache.save_done(event.op, event.ok)

    def _over(self, event: LoadDone | SaveDone, kind: str) -> None:
        if not isinstance(event.ok, bool):
            raise ProtocolError(f"{type(event).__name__}: ok must be True or False, got {event.ok!r:.40}")
        if self.under_way.get(event.op) != kind:
            raise ProtocolError(f"{type(event).__name__}: no {kind} with number {event.op!r:.40} is under way")
        for waiting in (self.loads, self.saves):
            if any(operation.op == event.op for operation in waiting):
                raise ProtocolError(f"{type(event).__name__}: {kind} {event.op} has not been handed out yet")
        del self.under_way[event.op]
