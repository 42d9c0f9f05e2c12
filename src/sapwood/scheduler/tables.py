"""The page tables as the executor sees them: one row a slot, kept equal to what the leases hold."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from sapwood.cache import HybridPrefixCache, Lease

from .request import Request

_NO_PAGE = bytes(4)
_FEW = 8  # up to so many entries a loop beats numpy
Ints = npt.NDArray[np.int32]


class Tables:
    """Slots are given out lowest first. Columns are added as requests get longer; what a plan was given stays valid."""

    def __init__(self, cache: HybridPrefixCache, slots: int) -> None:
        self.cache = cache
        self.names = [group.name for group in cache.groups]
        self._at = {name: at for at, name in enumerate(self.names)}
        self.slots = slots
        self.arrays: dict[str, Ints] = {}
        self._free = list(range(slots))
        self._columns = 0
        self._widen(16)

    def _widen(self, columns: int) -> None:
        wider = {name: np.zeros((self.slots, columns), np.int32) for name in self.names}
        for name, table in self.arrays.items():
            wider[name][:, : self._columns] = table
        self.arrays = wider  # a new dict: a plan keeps the tables it was given
        self._flat = {name: table.reshape(-1) for name, table in wider.items()}
        self._bytes = [wider[name].reshape(-1).view(np.uint8).data for name in self.names]
        self._zeros = bytes(4 * columns)
        self._columns = columns

    def take_slot(self) -> int:
        return heapq.heappop(self._free)

    def give_slot(self, slot: int) -> None:
        """Nobody reads its row any more; what stands there is written over when it is taken again."""
        heapq.heappush(self._free, slot)

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
            if len(rows) > _FEW:
                self._flat[name][np.array(places)] = np.frombuffer(raw, np.int32)
            else:
                flat, at = self._bytes[self._at[name]], 0
                for place in places:
                    flat[4 * place : 4 * place + 4] = raw[at : at + 4]
                    at += 4

    def replace(self, slot: int, name: str, column: int, page: int) -> None:
        self.arrays[name][slot, column] = page

    def clear(self, name: str, slots: list[int], columns: list[int]) -> None:
        flat, width = self._bytes[self._at[name]], 4 * self._columns
        for slot, column in zip(slots, columns, strict=True):
            at = width * slot + 4 * column
            flat[at : at + 4] = _NO_PAGE
