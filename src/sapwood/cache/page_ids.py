"""Page ids by column, in the one form that tables, nodes and pools share: the bytes of int32, 0 is a hole.

And runs: columns that follow each other. Nothing here knows a tree.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
PageIds = bytes | bytearray
HOLE = bytes(4)  # a page id of 0
Ranges = list[tuple[int, int]]
Run = tuple[int, PageIds]  # a column, and the ids of the pages from there on
_ONE = Struct("<i")


def one(page: int) -> bytes:
    """A single id."""
    return _ONE.pack(page)


def first_of(ids: PageIds) -> int:
    """The first id, which is there."""
    page: int = _ONE.unpack_from(ids)[0]
    return page


def page_at(ids: PageIds | None, column: int) -> int:
    """The id at `column`; 0 where there is a hole, or nothing any more."""
    return int.from_bytes(ids[4 * column : 4 * column + 4], "little") if ids else 0


def width(ids: PageIds) -> int:
    """How many columns these are."""
    return len(ids) // 4


def part(ids: PageIds, low: int, high: int | None = None) -> PageIds:
    """The ids of the columns [low, high), or from `low` on."""
    return ids[4 * low :] if high is None else ids[4 * low : 4 * high]


def put(ids: bytearray, column: int, new: PageIds) -> None:
    """Write `new` from `column` on."""
    ids[4 * column : 4 * column + len(new)] = new


def leading_holes(ids: PageIds) -> int:
    """How many columns stand before the first page."""
    return (len(ids) - len(ids.lstrip(HOLE))) // 4


def as_ids(ids: PageIds) -> Ids:
    """As an array. A copy: a view would forbid a bytearray to grow."""
    return np.frombuffer(bytes(ids), np.int32)


def has_hole(ids: PageIds) -> bool:
    # Four zero bytes in a row are a hole, or belong to two ids beside each other: only then look closer.
    return HOLE in ids and 0 in memoryview(ids).cast("i").tolist()


def present(ids: PageIds) -> PageIds:
    """The ids without the holes."""
    if HOLE not in ids:
        return ids
    found = as_ids(ids)
    left: bytes = found[found != 0].tobytes()
    return left


def runs(columns: Ids) -> Ranges:
    """Sorted columns as ranges."""
    n = len(columns)
    if not n:
        return []
    first, last = int(columns[0]), int(columns[-1]) + 1
    if last - first == n:
        return [(first, last)]
    breaks = (np.diff(columns) != 1).nonzero()[0] + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(columns, breaks) if len(part)]


def runs_of(there: npt.NDArray[Any]) -> Ranges:
    """Where something stands (ids that are not 0, or a mask), as ranges."""
    return runs(there.nonzero()[0].astype(np.int32))


def mask_runs(mask: bytes | bytearray) -> Ranges:
    """Where a mask of bytes, 0 or 1 a page, has ones."""
    found: Ranges = []
    low = mask.find(1)
    while low >= 0:
        high = mask.find(0, low)
        if high < 0:
            high = len(mask)
        found.append((low, high))
        low = mask.find(1, high)
    return found


def lengthened(pages: bytearray | None, n: int) -> bytearray:
    """The ids of a group that is not closed, with holes at their end if they are fewer than `n`."""
    return bytearray(4 * n) if pages is None else pages.ljust(4 * n, b"\0") if len(pages) < 4 * n else pages


def pages_in(where: Ranges) -> int:
    return sum([high - low for low, high in where])


def ranges(pieces: list[Run]) -> Ranges:
    """Where `pieces`, in order, stand: neighbours joined."""
    if len(pieces) == 1:
        column, ids = pieces[0]
        return [(column, column + len(ids) // 4)]
    where: Ranges = []
    first, last = pieces[0][0], pieces[0][0]
    for column, ids in pieces:
        if column != last:
            where.append((first, last))
            first = column
        last = column + len(ids) // 4
    where.append((first, last))
    return where


def joined(pieces: list[Run]) -> bytes:
    """The ids of `pieces`, one after the other."""
    return bytes(pieces[0][1]) if len(pieces) == 1 else b"".join([ids for _, ids in pieces])


def picked(where: Ranges, ids: bytes, wanted: Ranges) -> bytes:
    """Of `ids`, which stand in the ranges `where`, those in the ranges `wanted`, all of which lie within them."""
    if wanted == where:
        return ids
    parts = []
    for low, high in wanted:
        at = 0
        for first, last in where:
            if first <= low < last:
                parts.append(ids[4 * (at + low - first) : 4 * (at + high - first)])
                break
            at += last - first
    return b"".join(parts)


def spread(where: Ranges, ids: PageIds, first: int, last: int) -> PageIds:
    """`ids` in their ranges of the pages [first, last), 0 elsewhere."""
    if len(ids) == 4 * (last - first):
        return ids
    wide = bytearray(4 * (last - first))
    at = 0
    for low, high in where:
        begin, end = 4 * (low - first), 4 * (high - first)
        wide[begin:end] = ids[at : at + end - begin]
        at += end - begin
    return wide
