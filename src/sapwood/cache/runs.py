"""Runs of pages: columns of a path that follow each other, and the ids of their pages as bytes. Knows no tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .pool import Ids

HOLE = bytes(4)  # a page id of 0
Ranges = list[tuple[int, int]]
Run = tuple[int, bytes | bytearray]  # a column, and the ids of the pages from there on


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


def present(raw: bytes | bytearray) -> Ids:
    """The ids in `raw` without the holes."""
    ids = np.frombuffer(bytes(raw), np.int32)
    # Four zero bytes in a row are a hole, or two ids beside each other: only then look closer.
    return ids[ids != 0] if HOLE in raw else ids


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


def spread(where: Ranges, ids: bytes | bytearray, first: int, last: int) -> bytes | bytearray:
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
