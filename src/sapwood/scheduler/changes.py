"""What was written into the tables between two plans: a log, and arrays of it for whoever asks. Making the arrays costs
more than the writing, and an executor that reads the tables has no use for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Told = dict[str, tuple[Ints, Ints]]  # by group: places (slot * columns + column), and what stands there now
_NONE = np.zeros(0, np.int32)


class RowWrite(NamedTuple):
    """A whole row was written, in every group: what stood there, and what stands there now."""

    slot: int
    before: list[bytes]
    after: list[bytes]


class Entries(NamedTuple):
    """Single entries of a group were written. `before`: empty if they were 0."""

    group: int
    places: list[int]
    before: bytes
    after: bytes


class Changes(NamedTuple):
    """The log, once nobody writes it any more."""

    names: list[str]
    columns: int
    log: list[RowWrite | Entries]

    def told(self) -> Told:
        """The entries that differ from what the last plan with rows showed."""
        return {name: self._changed(group) for group, name in enumerate(self.names)}

    def _changed(self, group: int) -> tuple[Ints, Ints]:
        columns = self.columns
        old_rows: dict[int, Ints] = {}
        new_rows: dict[int, Ints] = {}
        old: dict[int, int] = {}  # single entries, of slots that were not written as a whole
        new: dict[int, int] = {}
        for entry in self.log:
            if isinstance(entry, Entries):
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
            new_rows[slot] = np.frombuffer(entry.after[group], np.int32).copy()
            if slot not in old_rows:
                was_there = old_rows[slot] = np.frombuffer(entry.before[group], np.int32).copy()
                for place in [place for place in old if place // columns == slot]:
                    was_there[place % columns] = old.pop(place)
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


class Everything:
    """All entries, changed or not, as they stand now."""

    def __init__(self, tables: dict[str, Ints]) -> None:
        self.tables = {name: table.reshape(-1).copy() for name, table in tables.items()}

    def told(self) -> Told:
        return {name: (np.arange(len(values), dtype=np.int32), values) for name, values in self.tables.items()}
