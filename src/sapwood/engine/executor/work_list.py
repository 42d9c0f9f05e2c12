"""Attention on a GPU, divided among programs: a step's rows cut into items of about equal work. numpy only.

A row of queries is cut into tiles, and where a tile reads many keys and there is little else to do, its keys are cut
too. Each part then leaves a sum of its own, and a merge joins them:

    row: 5 queries over 900 keys          tiles of 4 queries, keys in 2 parts
                                          item  queries 0-3, keys   0-447, part 0  --+
                                          item  queries 0-3, keys 448-898, part 1  --+--> merge: queries 0-3
                                          item  queries 4,   keys   0-447, part 2  --+
                                          item  queries 4,   keys 448-899, part 3  --+--> merge: query 4

How many items and parts there can be is known from the numbers of rows and tokens alone, so that a graph has room for
them whatever comes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

# Numbers of an item: table row, first query, queries, position, first key, end of keys, part or -1, unused.
ITEM_NUMBERS = 8
MERGE_NUMBERS = 4  # numbers of a merge: first query, queries, first part, parts
MIN_PART_KEYS = 256  # of a part
_BLOCK_KEYS = 128  # keys between the begins of parts are a multiple of this, and so of what a kernel takes at once


class Tiles(NamedTuple):
    """How queries are cut: `queries` of them to a tile, and about as many items wanted as `target`."""

    queries: int
    target: int

    def most_items(self, rows: int, tokens: int) -> int:
        """No step of so many rows and tokens has more items than this."""
        return rows + tokens // self.queries + self.most_parts()

    def most_parts(self) -> int:
        """A tile is cut if it has 1.5 times the keys of a part at least: so parts are 4/3 of the target at most."""
        return -(-4 * self.target // 3)


class WorkList(NamedTuple):
    items: Ints  # [n, ITEM], the longest first
    merges: Ints  # [m, MERGE]
    parts: int


_NO_MERGES = np.zeros((0, MERGE_NUMBERS), np.int32)


def work_list(
    starts: npt.NDArray[Any], lengths: npt.NDArray[Any], slots: npt.NDArray[Any], window: int | None, tiles: Tiles
) -> WorkList:
    """The items of rows that compute [start, start + length), which lie one after the other, and whose tables are at
    `slots`."""
    begins = np.cumsum(lengths) - lengths
    size = tiles.queries
    if int(lengths.max()) > 1 and size > 0:
        count = -(-lengths // size)
        row = np.repeat(np.arange(len(lengths)), count)
        at = (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)) * size
        first, position = begins[row] + at, starts[row] + at
        queries, slots = np.minimum(size, lengths[row] - at), slots[row]
    else:
        first, position, queries = begins, starts, lengths
    end = position + queries
    begin = np.maximum(0, position - window + 1) if window else np.zeros_like(position)
    keys = end - begin

    items = np.empty((len(first), ITEM_NUMBERS), np.int32)
    for column, numbers in enumerate((slots, first, queries, position, begin, end, -1, 0)):
        items[:, column] = numbers
    each = max(MIN_PART_KEYS, -(-int(keys.sum()) // tiles.target))
    if int(keys.max()) * 2 < each * 3:  # none is cut
        return WorkList(items[np.argsort(-keys, kind="stable")], _NO_MERGES, 0)

    wanted = np.maximum(1, (2 * keys + each) // (2 * each))  # to nearest
    step = -(-keys // (wanted * _BLOCK_KEYS)) * _BLOCK_KEYS
    count = np.where(wanted > 1, -(-keys // step), 1)
    cut = count > 1
    number = np.cumsum(np.where(cut, count, 0)) - np.where(cut, count, 0)  # of the first part of each
    merges = np.stack([first[cut], queries[cut], number[cut], count[cut]], 1).astype(np.int32)

    row = np.repeat(np.arange(len(items)), count)
    at = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    items, of = items[row], cut[row]
    items[:, 4] += np.where(of, at * step[row], 0).astype(np.int32)
    items[:, 5] = np.where(of, np.minimum(end[row], items[:, 4] + step[row]), end[row])
    items[:, 6] = np.where(of, number[row] + at, -1)
    order = np.argsort(items[:, 4] - items[:, 5], kind="stable")
    return WorkList(items[order], merges, int(count[cut].sum()))
