"""The page tables as the executor sees them: one row a slot, kept equal to what the leases hold.

What is written is kept in a log until the next plan with rows. The `changes` of that plan are made of it when they are
read: making arrays costs more than the writing, and an executor that reads the tables has no use for them."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.cache import HybridPrefixCache, Lease

from .request import Request

Ints = npt.NDArray[np.int32]
ChangedEntries = dict[str, tuple[Ints, Ints]]  # by group: places (slot * columns + column), and what stands there now
_LOOP_MAX_ENTRIES = 8  # up to so many entries a loop beats numpy
_FIRST_COLUMNS = 16
_NONE = np.zeros(0, np.int32)


class RowWrite(NamedTuple):
    """The first columns of a row were written, in every group: what stood there, and what stands there now. Behind
    them all entries are 0, before and after."""

    slot: int
    before: list[bytes]
    after: list[bytes]


class EntryWrites(NamedTuple):
    """Single entries of a group were written. `before`: empty if they were 0."""

    group: int
    places: list[int]
    before: bytes
    after: bytes


class ChangeLog(NamedTuple):
    """The log between two plans, once nothing more is added to it."""

    names: list[str]
    columns: int
    log: list[RowWrite | EntryWrites]

    def entries(self) -> ChangedEntries:
        """The entries that differ from what the last plan with rows showed."""
        return {name: self._changed(group) for group, name in enumerate(self.names)}

    def _changed(self, group: int) -> tuple[Ints, Ints]:
        columns = self.columns
        old_rows: dict[int, Ints] = {}
        new_rows: dict[int, Ints] = {}
        old: dict[int, int] = {}  # single entries, of slots that were not written as a whole
        new: dict[int, int] = {}
        for entry in self.log:
            if isinstance(entry, EntryWrites):
                if entry.group != group:
                    continue
                after = np.frombuffer(entry.after, np.int32).tolist()
                before = np.frombuffer(entry.before, np.int32).tolist() or [0] * len(after)
                for place, was, now in zip(entry.places, before, after, strict=True):
                    row = new_rows.get(place // columns)
                    if row is not None:
                        row[place % columns] = now
                    else:
                        old.setdefault(place, was)
                        new[place] = now
                continue
            slot = entry.slot
            new_rows[slot] = self._row(entry.after[group])
            if slot not in old_rows:
                row_before = old_rows[slot] = self._row(entry.before[group])
                for place in [place for place in old if place // columns == slot]:
                    row_before[place % columns] = old.pop(place)
                    del new[place]
        found: list[tuple[Ints, Ints]] = []
        for slot, row in new_rows.items():
            where = (row != old_rows[slot]).nonzero()[0]
            found.append(((where + slot * columns).astype(np.int32), row[where]))
        differ = [place for place, now in new.items() if now != old[place]]
        if differ:
            found.append((np.array(differ, np.int32), np.array([new[place] for place in differ], np.int32)))
        if not found:
            return _NONE, _NONE
        return np.concatenate([places for places, _ in found]), np.concatenate([values for _, values in found])

    def _row(self, raw: bytes) -> Ints:
        row: Ints = np.frombuffer(raw.ljust(4 * self.columns, b"\0"), np.int32).copy()
        return row


class AllEntries:
    """All entries, changed or not, as they stand now."""

    def __init__(self, tables: dict[str, Ints]) -> None:
        self.tables = {name: table.reshape(-1).copy() for name, table in tables.items()}

    def entries(self) -> ChangedEntries:
        return {name: (np.arange(len(values), dtype=np.int32), values) for name, values in self.tables.items()}


class Tables:
    """Slots are given out lowest first. All entries are 0 at first. If `columns` is 0, columns are added as requests
    get longer; what a plan was given stays valid."""

    def __init__(self, cache: HybridPrefixCache, slots: int, columns: int = 0) -> None:
        self.cache = cache
        self.names = [group.name for group in cache.groups]
        self._at = {name: at for at, name in enumerate(self.names)}
        self.slots = slots
        self.arrays: dict[str, Ints] = {}
        self._free = list(range(slots))
        self.seated: dict[int, str] = {}  # slots with a new owner since the last plan with rows
        self._columns = 0
        self._used = [0] * slots  # by slot: behind so many columns all entries are 0
        self._log: list[RowWrite | EntryWrites] = []
        self._all = False  # the next plan shows all entries
        self._widen(columns or _FIRST_COLUMNS)
        self._all = False  # at first all entries are 0

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
        """The next plan shows that this slot has a new owner."""
        self.seated[slot] = id

    def give_slot(self, slot: int) -> None:
        """No plan reads its row any more. What stands there is written over when the slot is taken again."""
        self.seated.pop(slot, None)
        heapq.heappush(self._free, slot)

    # ---- what changes

    def write(self, slot: int, lease: Lease) -> None:
        """Everything the lease has, in every group."""
        tables = self.cache.tables(lease)
        longest = max(map(len, tables))
        if longest > 4 * self._columns:
            self._widen(max(longest // 4, 2 * self._columns))
        length = max(longest, 4 * self._used[slot])
        self._used[slot] = longest // 4
        first = 4 * self._columns * slot
        last = first + length
        before, after = [], []
        for rows, raw in zip(self._bytes, tables, strict=True):
            row = bytes(raw).ljust(length, b"\0")
            before.append(rows[first:last].tobytes())
            after.append(row)
            rows[first:last] = row
        self._log.append(RowWrite(slot, before, after))

    def append(self, rows: list[Request], grown: dict[str, bytes]) -> None:
        """One more page for each of these, in the groups that have pages."""
        places = []
        columns, used = self._columns, self._used
        for row in rows:
            if row.column >= columns:
                self._widen(max([2 * columns, *(row.column + 1 for row in rows)]))
                return self.append(rows, grown)
            places.append(row.slot * columns + row.column)
        for row in rows:
            row.column += 1
            used[row.slot] = max(used[row.slot], row.column)
        for name, raw in grown.items():
            at = self._at[name]
            self._log.append(EntryWrites(at, places, b"", raw))
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
        self._log.append(EntryWrites(at, places, b"".join(before), raw))

    # ---- what a plan shows of it

    def take_seated(self) -> list[tuple[int, str]]:
        """Slots with a new owner since the last plan with rows."""
        seated, self.seated = sorted(self.seated.items()), {}
        return seated

    def show_all(self) -> None:
        """The next plan shows all entries."""
        self._all = True
        self._log = []

    def take_changes(self) -> ChangeLog | AllEntries:
        """What was written since the last plan with rows."""
        log = self._log
        self._log = []
        if self._all:
            self._all = False
            return AllEntries(self.arrays)
        return ChangeLog(self.names, self._columns, log)
