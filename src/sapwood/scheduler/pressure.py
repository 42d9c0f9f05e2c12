"""When pages run out. In order: evict (the cache does that by itself); let a row that cannot grow sit out a plan; then
retract somebody: the least urgent, and of those the latest to arrive.

All of it happens before the first row of a plan is made: nobody who is in a plan is ever retracted.
"""

from __future__ import annotations

from .book import Book
from .request import Request

_PATIENCE = 8  # plans that a row sits out while transfers are under way that may free memory


class Pressure:
    def __init__(self, book: Book) -> None:
        self.book = book

    def relieve(self) -> None:
        """Those who sat out the last plan and still cannot grow: somebody less urgent makes room."""
        for request in [r for r in self.book.prefilling.items if r.sat_out]:
            if request.lease is None:
                continue  # retracted for the sake of one before it
            if self.book.transfers.pending and request.sat_out < _PATIENCE:
                continue  # an acknowledgement may free enough
            while not self._can_go_on(request):
                victim = self._victim(request)
                if victim is None:
                    break
                self.book.retract(victim)

    def grow_decodes(self) -> bool:
        """A page for every decode row that needs one. Who gets none sits out; returns whether anybody does."""
        book = self.book
        rows = list(book.decoding.standing)
        if not rows or self._grow(rows):
            return False
        tight = False
        for row in sorted(rows, key=lambda request: request.key):
            if not self._grow([row]):
                tight = True
                row.sat_out = 1
                book.counts["sat_out"] += 1
                book.sit_out(row)
        return tight

    def _grow(self, rows: list[Request]) -> bool:
        book = self.book
        grown = book.cache.grow_rows([row.lease for row in rows if row.lease is not None])
        if grown is None:
            return False
        book.tables.append(rows, grown)
        return True

    def break_deadlock(self) -> bool:
        """Nobody who holds memory can go on: the least urgent gives up what it has. False if there is nobody, or if
        transfers are under way that will free memory or let somebody go on."""
        if self.book.transfers.pending:
            return False
        victim = self._victim(None)
        if victim is None:
            return False
        self.book.retract(victim)
        return True

    def _can_go_on(self, request: Request) -> bool:
        assert request.lease is not None
        return self.book.cache.growable(request.lease, request.position + 1) > request.position

    def _victim(self, needy: Request | None) -> Request | None:
        """The least urgent, then the latest, of those behind `needy` whose memory would help anybody."""
        behind = [r for r in self.book.holders() if needy is None or r.key > needy.key]
        for request in sorted(behind, key=lambda r: r.key, reverse=True):
            assert request.lease is not None
            if self.book.cache.would_free(request.lease):
                return request
        return max(behind, key=lambda r: r.key) if behind and needy is None else None
