"""When pages run out. In order: evict (the cache does that by itself); let a row that cannot grow sit out a plan; then
retract a request: the least urgent, and of those the latest to arrive. An overdue request is retracted only for an
older overdue one.

All of it happens before the first row of a plan is made, and only while no plan is in flight. So no request that is in
a plan ever sits out or is retracted.
"""

from __future__ import annotations

from .book import Book
from .request import Request

_MAX_PLANS_WAITED = 8  # plans that a row sits out while transfers are under way that may free memory


class Pressure:
    def __init__(self, book: Book) -> None:
        self.book = book
        self.max_overtaken = book.config.max_overtaken

    def rank(self, request: Request) -> tuple[int, int, int]:
        """Whose memory goes last: the overdue by arrival, then by urgency and arrival."""
        if request.overtaken >= self.max_overtaken:
            return 0, request.arrival, 0
        return 1, request.priority, request.arrival

    def relieve(self) -> None:
        """For requests that sat out the last plan and still cannot grow: less urgent ones make room."""
        for request in sorted([r for r in self.book.prefilling.items if r.sat_out], key=self.rank):
            if request.lease is None:
                continue  # retracted for the sake of one before it
            if self.book.transfers.pending and request.sat_out < _MAX_PLANS_WAITED:
                continue  # an acknowledgement may free enough
            while not self._can_go_on(request):
                victim = self._victim(request)
                if victim is None:
                    break
                self.book.retract(victim)

    def grow_decodes(self) -> bool:
        """A page for every decode row that needs one, or, if that is too many, for none."""
        rows = list(self.book.decoding.standing)
        return not rows or self._grow(rows)

    def let_sit_out(self) -> None:
        """A page for the first of the decode rows that need one. Rows that get none sit out."""
        book = self.book
        for row in sorted(book.decoding.standing, key=self.rank):
            if not self._grow([row]):
                row.sat_out = 1
                book.counts["sat_out"] += 1
                book.sit_out(row)

    def _grow(self, rows: list[Request]) -> bool:
        book = self.book
        grown = book.cache.grow_rows([row.lease for row in rows if row.lease is not None])
        if grown is None:
            return False
        book.tables.append(rows, grown)
        return True

    def break_deadlock(self) -> bool:
        """No request that holds memory can go on: the least urgent gives up what it has. False if none holds any, or
        if transfers are under way that will free memory or let a request go on."""
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
        """The least urgent, then the latest, of the requests behind `needy` whose memory would help at all."""
        holders = sorted(self.book.holders(), key=self.rank, reverse=True)
        behind = [r for r in holders if needy is None or self.rank(r) > self.rank(needy)]
        for request in behind:
            assert request.lease is not None
            if self.book.cache.would_free(request.lease):
                return request
        return behind[0] if behind and needy is None else None
