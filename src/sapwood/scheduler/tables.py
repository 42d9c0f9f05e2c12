"""The page tables as the executor sees them: one row a slot, kept equal to what the leases hold."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from sapwood.cache import HybridPrefixCache, Lease

from .changes import Changes, Entries, Everything, RowWrite
from .request import Request

_LOOP_MAX_ENTRIES = 8  # up to so many entries a loop beats numpy
_FIRST_COLUMNS = 16
_new = tuple.__new__  # a NamedTuple in a third of the time
Ints = npt.NDArray[np.int32]


class Tables:
    """Slots are given out lowest first. All entries are 0 at first. If `columns` is 0, columns are added as requests
    get longer; what a plan was given stays valid.

    What is written, and what stood there, is kept in a log until the next plan with rows, which can tell what differs.
    """

    def __init__(self, cache: HybridPrefixCache, slots: int, columns: int = 0) -> None:
        self.cache = cache
        self.names = [group.name for group in cache.groups]
        self._at = {name: at for at, name in enumerate(self.names)}
        self.slots = slots
        self.arrays: dict[str, Ints] = {}
        self._free = list(range(slots))
        self.seated: dict[int, str] = {}  # slots with a new owner since the last plan with rows
        self._columns = 0
        self._log: list[RowWrite | Entries] = []
        self._all = False  # the next plan tells everything
        self._widen(columns or _FIRST_COLUMNS)
        self._all = False  # all entries are 0, as everybody knows

    def _widen(self, columns: int) -> None:
        wider = {name: np.zeros((self.slots, columns), np.int32) for name in self.names}
        for name, table in self.arrays.items():
            wider[name][:, : self._columns] = table
        self.arrays = wider  # a new dict: a plan keeps the tables it was given
        self._flat = [wider[name].reshape(-1) for name in self.names]
        self._bytes = [flat.view(np.uint8).data for flat in self._flat]
        self._columns = columns
        self.show_all()

    def take_slot(self, id: str) -> int:
        slot = heapq.heappop(self._free)
        self.seat(slot, id)
        return slot

    def seat(self, slot: int, id: str) -> None:
        """The next plan tells that this slot has a new owner."""
        self.seated[slot] = id

    def give_slot(self, slot: int) -> None:
        """Nobody reads its row any more; what stands there is written over when it is taken again."""
        self.seated.pop(slot, None)
        heapq.heappush(self._free, slot)

    # ---- what changes

    def write(self, slot: int, lease: Lease) -> None:
        """Everything the lease has, in every group."""
        tables, width = self.cache.tables(lease), 4 * self._columns
        for raw in tables:
            if len(raw) > width:
                self._widen(max(len(raw) // 4, 2 * self._columns))
                width = 4 * self._columns
        first, last = width * slot, width * slot + width
        before, after = [], []
        for at, raw in enumerate(tables):
            rows, row = self._bytes[at], bytes(raw).ljust(width, b"\0")
            before.append(rows[first:last].tobytes())
            after.append(row)
            rows[first:last] = row
        self._log.append(_new(RowWrite, (slot, before, after)))

    def append(self, rows: list[Request], grown: dict[str, bytes]) -> None:
        """One more page for each of these, in the groups that have pages."""
        places = []
        columns = self._columns
        for row in rows:
            if row.column >= columns:
                self._widen(max([2 * columns, *(row.column + 1 for row in rows)]))
                return self.append(rows, grown)
            places.append(row.slot * columns + row.column)
        for row in rows:
            row.column += 1
        for name, raw in grown.items():
            at = self._at[name]
            self._log.append(_new(Entries, (at, places, b"", raw)))
            if len(places) > _LOOP_MAX_ENTRIES:
                self._flat[at][np.array(places)] = np.frombuffer(raw, np.int32)
                continue
            rows_of, first = self._bytes[at], 0
            for place in places:
                rows_of[4 * place : 4 * place + 4] = raw[first : first + 4]
                first += 4

    def replace(self, slot: int, name: str, column: int, page: int) -> None:
        self._put(self._at[name], [slot * self._columns + column], page.to_bytes(4, "little"))

    def clear(self, name: str, slots: list[int], columns: list[int]) -> None:
        width = self._columns
        places = [width * slot + column for slot, column in zip(slots, columns, strict=True)]
        self._put(self._at[name], places, bytes(4 * len(places)))

    def _put(self, at: int, places: list[int], raw: bytes) -> None:
        """These pages at these places."""
        rows, before = self._bytes[at], []
        for i, place in enumerate(places):
            before.append(rows[4 * place : 4 * place + 4].tobytes())
            rows[4 * place : 4 * place + 4] = raw[4 * i : 4 * i + 4]
        self._log.append(_new(Entries, (at, places, b"".join(before), raw)))

    # ---- what a plan tells of it

    def take_seated(self) -> list[tuple[int, str]]:
        """Slots with a new owner since the last plan with rows."""
        seated, self.seated = sorted(self.seated.items()), {}
        return seated

    def show_all(self) -> None:
        """The next plan tells everything."""
        self._all = True
        self._log = []

    def take_changes(self) -> Changes | Everything:
        """What was written since the last plan with rows."""
        log = self._log
        self._log = []
        if self._all:
            self._all = False
            return Everything(self.arrays)
        return _new(Changes, (self.names, self._columns, log))
