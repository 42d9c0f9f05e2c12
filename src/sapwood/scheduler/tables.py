"""The page tables as the executor sees them: one row a slot, kept equal to what the leases hold."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from sapwood.cache import HybridPrefixCache, Lease

from .request import Request

_NO_PAGE = bytes(4)
_FEW = 8  # up to so many entries a loop beats numpy
_FIRST_COLUMNS = 16
Ints = npt.NDArray[np.int32]
Changes = dict[str, tuple[Ints, Ints]]  # by group: places (slot * columns + column), and what stands there now
_NONE = np.zeros(0, np.int32)


class Tables:
    """Slots are given out lowest first. All entries are 0 at first. If `columns` is 0, columns are added as requests
    get longer; what a plan was given stays valid.

    What is written over is remembered, as the last plan with rows showed it, until the next: so that one can tell what
    differs."""

    def __init__(self, cache: HybridPrefixCache, slots: int, columns: int = 0) -> None:
        self.cache = cache
        self.names = [group.name for group in cache.groups]
        self._at = {name: at for at, name in enumerate(self.names)}
        self.slots = slots
        self.arrays: dict[str, Ints] = {}
        self._free = list(range(slots))
        self._seated: dict[int, str] = {}  # slots with a new owner since the last plan with rows
        self._columns = 0
        self._nothing: Changes = dict.fromkeys(self.names, (_NONE, _NONE))  # handed to many plans: nobody writes it
        self._forget()
        self._widen(columns or _FIRST_COLUMNS)
        self._all = False

    def _forget(self) -> None:
        self._rows: dict[
            int, list[bytes]
        ] = {}  # slots written as a whole since the last plan with rows: what was there
        self._places: list[dict[int, int]] = [{} for _ in self.names]  # and single entries
        self._touched: set[int] = set()  # the slots of those
        self._grown: list[tuple[list[int], dict[str, bytes]]] = []  # entries that were 0, while nothing else is written

    def _widen(self, columns: int) -> None:
        wider = {name: np.zeros((self.slots, columns), np.int32) for name in self.names}
        for name, table in self.arrays.items():
            wider[name][:, : self._columns] = table
        self.arrays = wider  # a new dict: a plan keeps the tables it was given
        self._flat = [wider[name].reshape(-1) for name in self.names]
        self._bytes = [flat.view(np.uint8).data for flat in self._flat]
        self._zeros = bytes(4 * columns)
        self._columns = columns
        self.show_all()

    def take_slot(self, id: str) -> int:
        slot = heapq.heappop(self._free)
        self.seat(slot, id)
        return slot

    def seat(self, slot: int, id: str) -> None:
        """The next plan tells that this slot has a new owner."""
        self._seated[slot] = id

    def give_slot(self, slot: int) -> None:
        """Nobody reads its row any more; what stands there is written over when it is taken again."""
        self._seated.pop(slot, None)
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
        if self._grown:
            self._fold()
        if slot not in self._rows:
            self._remember(slot, first, last)
        for at, raw in enumerate(tables):
            rows, end = self._bytes[at], first + len(raw)
            rows[first:end] = raw
            rows[end:last] = self._zeros[: last - end]

    def _remember(self, slot: int, first: int, last: int) -> None:
        before = [bytes(rows[first:last]) for rows in self._bytes]
        if slot in self._touched:  # not what stands there, but what the last plan showed
            for at, places in enumerate(self._places):
                row = bytearray(before[at])
                for place in [place for place in places if first <= 4 * place < last]:
                    row[4 * place - first : 4 * place - first + 4] = places.pop(place).to_bytes(4, "little")
                before[at] = bytes(row)
        self._rows[slot] = before

    def append(self, rows: list[Request], grown: dict[str, bytes]) -> None:
        """One more page for each of these, in the groups that have pages."""
        columns = self._columns
        places = [row.slot * columns + row.column for row in rows]
        for row in rows:
            if row.column >= columns:
                self._widen(max([2 * columns, *(row.column + 1 for row in rows)]))
                return self.append(rows, grown)
        for row in rows:
            row.column += 1
        if self._rows or self._touched:
            for name, raw in grown.items():
                self._put(self._at[name], places, raw)
            return
        self._grown.append((places, grown))
        for name, raw in grown.items():
            if len(places) > _FEW:
                self._flat[self._at[name]][np.array(places)] = np.frombuffer(raw, np.int32)
                continue
            flat, first = self._bytes[self._at[name]], 0
            for place in places:
                flat[4 * place : 4 * place + 4] = raw[first : first + 4]
                first += 4

    def _fold(self) -> None:
        """Something else is written too: from now on entries are looked at one by one."""
        for places, grown in self._grown:
            self._touched.update([place // self._columns for place in places])
            for name in grown:
                self._places[self._at[name]].update(dict.fromkeys(places, 0))
        self._grown = []

    def replace(self, slot: int, name: str, column: int, page: int) -> None:
        self._put(self._at[name], [slot * self._columns + column], page.to_bytes(4, "little"))

    def clear(self, name: str, slots: list[int], columns: list[int]) -> None:
        width = self._columns
        places = [width * slot + column for slot, column in zip(slots, columns, strict=True)]
        self._put(self._at[name], places, bytes(4 * len(places)))

    def _put(self, at: int, places: list[int], raw: bytes) -> None:
        """These pages at these places."""
        if self._grown:
            self._fold()
        columns, written, before, rows = self._columns, self._rows, self._places[at], self._bytes[at]
        for i, place in enumerate(places):
            slot = place // columns
            if slot not in written:
                before.setdefault(place, int.from_bytes(rows[4 * place : 4 * place + 4], "little"))
                self._touched.add(slot)
            rows[4 * place : 4 * place + 4] = raw[4 * i : 4 * i + 4]

    # ---- what a plan tells of it

    def take_seated(self) -> list[tuple[int, str]]:
        """Slots with a new owner since the last plan with rows."""
        if not self._seated:
            return []
        seated, self._seated = sorted(self._seated.items()), {}
        return seated

    def show_all(self) -> None:
        """The next plan tells everything."""
        self._all = True
        self._forget()

    def take_changes(self) -> Changes:
        """The entries that differ from what the last plan with rows showed."""
        if self._all:
            every = np.arange(self.slots * self._columns, dtype=np.int32)
            changes = {name: (every, self._flat[at].copy()) for name, at in self._at.items()}
            self._all = False
        elif self._grown:
            changes = self._nothing.copy()
            where = np.array([place for places, _ in self._grown for place in places], np.int32)
            for name in self._grown[0][1]:
                changes[name] = where, np.frombuffer(b"".join([grown[name] for _, grown in self._grown]), np.int32)
            self._grown = []
            return changes
        elif self._rows or self._touched:
            changes = {name: self._changed(at) for name, at in self._at.items()}
        else:
            return self._nothing
        self._forget()
        return changes

    def _changed(self, at: int) -> tuple[Ints, Ints]:
        flat, columns = self._flat[at], self._columns
        found: list[Ints] = []
        for slot, rows in self._rows.items():
            first = slot * columns
            differs = flat[first : first + columns] != np.frombuffer(rows[at], np.int32)
            found.append((differs.nonzero()[0] + first).astype(np.int32))
        if self._places[at]:
            fields = np.array([*self._places[at].items()], np.int32)
            places = fields[:, 0]
            found.append(places[flat[places] != fields[:, 1]])
        if not found:
            return _NONE, _NONE
        where = found[0] if len(found) == 1 else np.concatenate(found)
        return where, flat[where]
