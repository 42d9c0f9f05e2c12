"""What to do in one step: a batch, the copies around it, and transfers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.cache import Operation, PageCopy, StoreOperation

from .decode import CACHED, LENGTH, SLOT, STARTS, DecodeRows
from .events import Ended
from .prefetch import Lookup
from .request import Request
from .tables import AllEntries, ChangedEntries, ChangeLog

Ints = npt.NDArray[np.int32]


class Chunk(NamedTuple):
    """A row that is not one of the decode rows: positions [start, end) of what is known of a request."""

    request: Request
    start: int
    end: int
    samples: bool
    write_from: dict[str, int]


@dataclass(slots=True)
class Batch:
    """Rows, by arrays. `tokens` are those of all rows, one row after the other. Read them, do not change them: plans
    share what stays the same.

    cached      prompt tokens whose K/V this request did not compute
    samples     this row yields a token
    write_from  by group: K/V of earlier positions go to the null page
    adapters    content digest, or None for the base model
    tokens      -1: the token that this id samples in the last plan with rows before this one
    decodes     how many of the first rows are decode rows: one token each, in every plan
    generation  the same while ids, slots and adapters of these stay the same; 0 if there are none
    """

    ids: list[str]
    slots: Ints
    starts: Ints
    lengths: Ints
    tokens: Ints
    cached: Ints
    samples: npt.NDArray[np.bool_]
    write_from: dict[str, Ints]
    adapters: list[bytes | None]
    decodes: int = 0
    generation: int = 0


def _no_rows() -> Batch:
    none = np.zeros(0, np.int32)
    return Batch([], none, none, none, none, none, np.zeros(0, np.bool_), {}, [])


@dataclass(slots=True)
class Plan:
    """One step. `tables[group][slots[i]]` is what row i reads. An empty plan has no step and wants no event.

    changes  by group (places, values): the table entries, by slot * columns + column, that differ from what the last
             plan with rows showed (at first all are 0). After a StepFailed, and when tables have grown, all of them
    seated   (slot, id) of slots with a new owner since then: what an executor keeps by slot begins anew there. Shown
             again if the plan that showed it has failed
    """

    step: int | None = None
    batch: Batch = field(default_factory=_no_rows)
    tables: dict[str, Ints] = field(default_factory=dict)
    copies: list[PageCopy] = field(default_factory=list)
    loads: list[Operation] = field(default_factory=list)
    saves: list[Operation] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    fetches: list[StoreOperation] = field(default_factory=list)
    backups: list[StoreOperation] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    wake_in: int | None = None
    seated: list[tuple[int, str]] = field(default_factory=list)
    _log: ChangeLog | AllEntries | None = None
    _changes: ChangedEntries | None = None

    @property
    def changes(self) -> ChangedEntries:
        """Made when it is read for the first time; later plans do not change it."""
        if self._changes is None:
            self._changes = self._log.entries() if self._log is not None else {}
        return self._changes

    @property
    def empty(self) -> bool:
        return self.step is None


def decode_batch(rows: DecodeRows, groups: list[str]) -> Batch:
    """All decode rows, and no chunks."""
    ids, slots, cached, lengths, _, samples, adapters, _ = rows.shown()
    starts, tokens = rows.starts(), rows.tokens()
    write_from = dict.fromkeys(groups, starts)
    n, generation = rows.count, rows.generation
    return Batch(ids, slots, starts, lengths, tokens, cached, samples, write_from, adapters, n, generation)


def batch_of(rows: DecodeRows | None, chunks: list[Chunk], groups: list[str]) -> Batch:
    """The decode rows, if they take part, and then the chunks. Small arrays cost what calls cost: so all numbers are
    made in one."""
    ids: list[str] = []
    adapters: list[bytes | None] = []
    numbers, cached, lengths, starts, sampling, pieces = array("i"), array("i"), array("i"), array("i"), [], []
    for request, start, end, yields, _ in chunks:
        ids.append(request.id)
        adapters.append(request.adapter)
        numbers.append(request.slot)
        cached.append(request.cached)
        lengths.append(end - start)
        starts.append(start)
        sampling.append(yields)
        pieces.append(request.tokens[4 * start : 4 * end])
    numbers += cached
    numbers += lengths
    numbers += starts
    for name in groups:
        for chunk in chunks:
            numbers.append(chunk.write_from[name])
    n, generation, mine = 0, 0, len(chunks)
    samples = np.array(sampling, np.bool_)
    tokens: Ints = np.frombuffer(b"".join(pieces), np.int32)
    fields: Ints = np.frombuffer(numbers, np.int32).reshape(-1, mine)
    if rows is not None and rows.count:
        n, generation = rows.count, rows.generation
        theirs = rows.shown()
        both = np.empty((len(fields), n + mine), np.int32)
        both[:STARTS, :n] = theirs.fixed[:STARTS]
        both[STARTS:, :n] = rows.starts()
        both[:, n:] = fields
        fields = both
        ids, adapters = theirs.ids + ids, theirs.adapters + adapters
        tokens, samples = np.concatenate([rows.tokens(), tokens]), np.concatenate([theirs.samples, samples])
    rows_of = list(fields)
    write_from = dict(zip(groups, rows_of[STARTS + 1 :], strict=True))
    return Batch(
        ids,
        rows_of[SLOT],
        rows_of[STARTS],
        rows_of[LENGTH],
        tokens,
        rows_of[CACHED],
        samples,
        write_from,
        adapters,
        n,
        generation,
    )
