"""What to do in one step: a batch, the copies around it, and transfers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sapwood.cache import Operation, PageCopy, StoreOperation

from .decode import Decoding
from .events import Ended
from .prefetch import Lookup
from .request import Request

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
    seated   (slot, id) of slots with a new owner since then: what an executor keeps by slot begins anew there. Told
             again if the plan that told it has failed
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
    changes: dict[str, tuple[Ints, Ints]] = field(default_factory=dict)
    seated: list[tuple[int, str]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return self.step is None


def decode_batch(rows: Decoding, groups: list[str]) -> Batch:
    """All decode rows, and nobody else."""
    ids, slots, lengths, cached, samples, adapters, _ = rows.shown()
    starts = rows.starts
    write_from = dict.fromkeys(groups, starts)
    n, generation = rows.count, rows.generation
    return Batch(ids, slots, starts, lengths, rows.tokens(), cached, samples, write_from, adapters, n, generation)


def batch_of(rows: Decoding | None, chunks: list[Chunk], groups: list[str]) -> Batch:
    """The decode rows, if they take part, and then the chunks."""
    requests, starts, ends, samples, begins = zip(*chunks, strict=True)
    raw = b"".join([request.tokens[4 * start : 4 * end] for request, start, end, _, _ in chunks])
    slots = [request.slot for request in requests]
    cached = [request.cached for request in requests]
    fields = np.array([slots, starts, ends, cached, *[[begin[name] for begin in begins] for name in groups]], np.int32)
    mine = Batch(
        [request.id for request in requests],
        fields[0],
        fields[1],
        fields[2] - fields[1],
        np.frombuffer(raw, np.int32),
        fields[3],
        np.array(samples, np.bool_),
        {name: fields[4 + at] for at, name in enumerate(groups)},
        [request.adapter for request in requests],
    )
    if rows is None or not rows.count:
        return mine
    theirs = decode_batch(rows, groups)
    both = np.concatenate
    return Batch(
        theirs.ids + mine.ids,
        both([theirs.slots, mine.slots]),
        both([theirs.starts, mine.starts]),
        both([theirs.lengths, mine.lengths]),
        both([theirs.tokens, mine.tokens]),
        both([theirs.cached, mine.cached]),
        both([theirs.samples, mine.samples]),
        {name: both([theirs.starts, mine.write_from[name]]) for name in groups},
        theirs.adapters + mine.adapters,
        theirs.decodes,
        theirs.generation,
    )
