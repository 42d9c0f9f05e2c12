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

    What has changed since the last plan with rows is found by looking only where something was written, and comparing
    with a copy of what that plan showed."""

    def __init__(self, cache: HybridPrefixCache, slots: int, columns: int = 0) -> None:
        self.cache = cache
        self.names = [group.name for group in cache.groups]
        self._at = {name: at for at, name in enumerate(self.names)}
        self.slots = slots
        self.arrays: dict[str, Ints] = {}
        self._free = list(range(slots))
        self._seated: dict[int, str] = {}  # slots with a new owner since the last plan with rows
        self._columns = 0
        self._shown: dict[str, Ints] = {}  # as the last plan with rows showed them; empty: the next shows everything
        self._nothing: Changes = dict.fromkeys(self.names, (_NONE, _NONE))
        self._widen(columns or _FIRST_COLUMNS)
        self._shown = {name: np.zeros_like(flat) for name, flat in self._flat.items()}

    def _widen(self, columns: int) -> None:
        wider = {name: np.zeros((self.slots, columns), np.int32) for name in self.names}
        for name, table in self.arrays.items():
            wider[name][:, : self._columns] = table
        self.arrays = wider  # a new dict: a plan keeps the tables it was given
        self._flat = {name: table.reshape(-1) for name, table in wider.items()}
        self._bytes = [wider[name].reshape(-1).view(np.uint8).data for name in self.names]
        self._zeros = bytes(4 * columns)
        self._columns = columns
        self.show_all()

    def take_slot(self, id: str) -> int:
        slot = heapq.heappop(self._free)
        self._seated[slot] = id
        return slot

    def give_slot(self, slot: int) -> None:
        """Nobody reads its row any more; what stands there is written over when it is taken again."""
        self._seated.pop(slot, None)
        heapq.heappush(self._free, slot)

    # ---- what changes

    def write(self, slot: int, lease: Lease) -> None:
        """Everything the lease has, in every group."""
        for at, raw in enumerate(self.cache.tables(lease)):
            n = len(raw)
            if n > 4 * self._columns:
                self._widen(max(n // 4, 2 * self._columns))
            rows, first = self._bytes[at], 4 * self._columns * slot
            last = first + 4 * self._columns
            rows[first : first + n] = raw
            rows[first + n : last] = self._zeros[: last - first - n]
        self._rows[slot] = None

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
            self._places[name] += places
            if len(rows) > _FEW:
                self._flat[name][np.array(places)] = np.frombuffer(raw, np.int32)
            else:
                flat, at = self._bytes[self._at[name]], 0
                for place in places:
                    flat[4 * place : 4 * place + 4] = raw[at : at + 4]
                    at += 4

    def replace(self, slot: int, name: str, column: int, page: int) -> None:
        self.arrays[name][slot, column] = page
        self._places[name].append(slot * self._columns + column)

    def clear(self, name: str, slots: list[int], columns: list[int]) -> None:
        flat, width = self._bytes[self._at[name]], self._columns
        places = [width * slot + column for slot, column in zip(slots, columns, strict=True)]
        for place in places:
            flat[4 * place : 4 * place + 4] = _NO_PAGE
        self._places[name] += places

    # ---- what a plan tells of it

    def take_seated(self) -> list[tuple[int, str]]:
        """Slots with a new owner since the last plan with rows."""
        if not self._seated:
            return []
        seated, self._seated = sorted(self._seated.items()), {}
        return seated

    def show_all(self) -> None:
        """The next plan tells everything."""
        self._shown = {}
        self._rows: dict[int, None] = {}  # slots written as a whole since the last plan with rows
        self._places: dict[str, list[int]] = {name: [] for name in self.names}  # and single entries

    def take_changes(self) -> Changes:
        """The entries that differ from what the last plan with rows showed."""
        if not self._shown:
            self.show_all()
            self._shown = {name: flat.copy() for name, flat in self._flat.items()}
            every = np.arange(self.slots * self._columns, dtype=np.int32)
            return {name: (every, flat.copy()) for name, flat in self._flat.items()}
        if not self._rows and not any(self._places.values()):
            return self._nothing
        changes = {name: self._changed(name) for name in self.names}
        self._rows = {}
        return changes

    def _changed(self, name: str) -> tuple[Ints, Ints]:
        shown, flat, columns = self._shown[name], self._flat[name], self._columns
        found = []
        for slot in self._rows:
            first = slot * columns
            found.append((flat[first : first + columns] != shown[first : first + columns]).nonzero()[0] + first)
        if self._places[name]:
            places = np.array(list(dict.fromkeys(self._places[name])))
            self._places[name] = []
            found.append(places[flat[places] != shown[places]])
            if self._rows:  # an entry may have been written with its row, and by itself
                found = [np.unique(np.concatenate(found))]
        if not found:
            return _NONE, _NONE
        where = found[0] if len(found) == 1 else np.concatenate(found)
        values = flat[where]
        shown[where] = values
        return where.astype(np.int32), values
