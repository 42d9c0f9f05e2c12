"""Runs of pages: columns of a path that follow each other, and the ids of their pages as bytes. Knows no tree."""

from __future__ import annotations

import numpy as np

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


def ranges(pieces: list[Run]) -> Ranges:
    """Where `pieces`, in order, stand: neighbours joined."""
    if len(pieces) == 1:
        column, ids = pieces[0]
        return [(column, column + len(ids) // 4)]
    where: Ranges = []
    for column, ids in pieces:
        end = column + len(ids) // 4
        if where and where[-1][1] == column:
            where[-1] = (where[-1][0], end)
        else:
            where.append((column, end))
    return where


def present(raw: bytes | bytearray) -> Ids:
    """The ids in `raw` without the holes."""
    ids = np.frombuffer(bytes(raw), np.int32)
    # Four zero bytes in a row are a hole, or two ids beside each other: only then look closer.
    return ids[ids != 0] if HOLE in raw else ids


def joined(pieces: list[Run]) -> Ids:
    """The ids of `pieces`, one after the other."""
    return np.frombuffer(b"".join([ids for _, ids in pieces]), np.int32)


def spread(where: Ranges, ids: Ids, first: int, last: int) -> Ids:
    """`ids` in their ranges of an array for the pages [first, last), 0 elsewhere."""
    if len(ids) == last - first:
        return ids
    array = np.zeros(last - first, np.int32)
    at = 0
    for low, high in where:
        array[low - first : high - first] = ids[at : at + high - low]
        at += high - low
    return array
