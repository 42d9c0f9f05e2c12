"""Readers of the pages of groups that are not closed: a count for every column of a node, beside its pages.

A reader holds columns of a path, not page numbers: a run of columns is one slice in each node, wherever its pages lie.
A column may be read while it is a hole, by a step whose pages were withdrawn under it; a page that fills it is read.
Once a namespace is unhooked there are no columns any more, and pools count the readers of each page.

Counting is for eviction alone. So leases and saves begin uncounted (`Tree.uncounted`): most come and go while free
pages are enough, and are never counted. `count_all` counts them when it matters what eviction could take, or when
what they read is taken apart; from then on they keep their counts up to date.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from .group import DEVICE
from .page_ids import HOLE, Ranges

if TYPE_CHECKING:
    from .node import Copy, Node
    from .tree import Tree

_CROWD: Final = 255  # so many readers, or more: how many more stands in `Copy.reader_overflow`
_MORE: Final = bytes([*range(1, 256), 255])
_LESS: Final = bytes([0, *range(255)])


def count_all(tree: Tree) -> None:
    """Count all readers that are not counted yet: the counts are exact now."""
    uncounted, tree.uncounted = tree.uncounted, {}
    for reader in uncounted:
        reader.count_reads(tree)


def use(tree: Tree, node: Node, low: int) -> None:
    """A reader, counted or not, begins to read the path to `node` on the device from column `low` on."""
    node.copies[DEVICE].used = tree.clock.now
    while node.start > low:
        assert node.parent is not None
        node = node.parent
        node.copies[DEVICE].used = tree.clock.now


def read(tree: Tree, node: Node, tier: int, g: int, low: int, high: int) -> None:
    """One more reader for the columns [low, high) of the path to `node`."""
    idle = 0
    for at, first, last in tree.cover(node, low, high):
        copy = at.copies[tier]
        reads = copy.reads[g]
        if reads is None:
            reads = copy.reads[g] = bytearray(at.n)
        elif len(reads) < last:
            reads += bytes(at.n - len(reads))
        before = reads[first:last]
        reads[first:last] = before.translate(_MORE)
        if 0 in before:
            idle += _there(copy, g, first, before, 0)
        if _CROWD in before:
            _count_overflow(copy, g, at.start + first, before)
    if idle:
        tree.tiers[tier].pools[g].idle -= idle


def unread(tree: Tree, node: Node, tier: int, g: int, low: int, high: int) -> None:
    """One reader less for the columns [low, high) of the path to `node`. Eviction hears of pages that became idle."""
    idle = 0
    for at, first, last in tree.cover(node, low, high):
        copy = at.copies[tier]
        reads = copy.reads[g]
        assert reads is not None, "a column has no reader to leave"
        before = reads[first:last]
        assert 0 not in before, "a column has no reader to leave"
        reads[first:last] = before.translate(_LESS)
        if 1 in before:
            here = _there(copy, g, first, before, 1)
            if here:
                idle += here
                tree.tiers[tier].queues[g].add(at, copy)
        if _CROWD in before:
            _less_of_a_crowd(copy, g, at.start, first, before)
    if idle:
        tree.tiers[tier].pools[g].idle += idle


def unread_one(tree: Tree, node: Node, g: int, column: int) -> None:
    """`unread` for one column, on the device, which has a page: what a decoding row does when it crosses a page."""
    while node.start > column:
        assert node.parent is not None
        node = node.parent
    copy, at = node.copies[DEVICE], column - node.start
    reads = copy.reads[g]
    count = reads[at] if reads is not None else 0
    if reads is None or not 0 < count < _CROWD:
        unread(tree, node, DEVICE, g, column, column + 1)
        return
    reads[at] = count - 1
    if count == 1:
        tree.device.pools[g].idle += 1
        tree.device.queues[g].add(node, copy)


def idle_in(tree: Tree, node: Node, tier: int, g: int, spans: Ranges) -> int:
    """How many pages in these columns of the path to `node` have no reader."""
    idle = 0
    for low, high in spans:
        for at, first, last in tree.cover(node, low, high):
            copy = at.copies[tier]
            reads = copy.reads[g]
            before = (reads or bytearray())[first:last].ljust(last - first, b"\0")
            idle += _there(copy, g, first, before, 0) if 0 in before else 0
    return idle


def unread_columns(copy: Copy, g: int, first: int, last: int) -> int:
    """How many of the columns [first, last) of a node, counted from its start, have no reader."""
    reads = copy.reads[g]
    return last - first if reads is None else reads.count(0, first, last) + max(0, last - max(first, len(reads)))


def counts(copy: Copy, g: int, start: int) -> dict[int, int]:
    """By page that has readers: how many. `start` is that of the node."""
    reads, pages = copy.reads[g], copy.pages[g]
    if reads is None or not pages:
        return {}
    reader_overflow = copy.reader_overflow or {}
    ids = np.frombuffer(bytes(pages), np.int32).tolist()
    return {
        page: count + reader_overflow.get((g, start + at), 0)
        for at, (page, count) in enumerate(zip(ids, reads, strict=False))
        if page and count
    }


def _there(copy: Copy, g: int, first: int, before: bytearray, count: int) -> int:
    """How many of the columns from `first` on, read so often before, have a page."""
    pages = copy.pages[g]
    if not pages:
        return 0
    here = pages[4 * first : 4 * (first + len(before))]
    # Four zero bytes in a row are a hole, or two ids beside each other: only then look closer.
    if HOLE not in here:
        return before.count(count, 0, len(here) // 4)
    ids = np.frombuffer(bytes(here), np.int32)
    return int(np.count_nonzero((ids != 0) & (np.frombuffer(bytes(before[: len(ids)]), np.uint8) == count)))


def _count_overflow(copy: Copy, g: int, column: int, before: bytearray) -> None:
    """One more reader for those of the columns from `column` on that had as many as a byte can count."""
    if copy.reader_overflow is None:
        copy.reader_overflow = {}
    for at, count in enumerate(before, column):
        if count == _CROWD:
            copy.reader_overflow[g, at] = copy.reader_overflow.get((g, at), 0) + 1


def _less_of_a_crowd(copy: Copy, g: int, start: int, first: int, before: bytearray) -> None:
    """One reader less, for columns of a node that had more than a byte can count: those still have as many."""
    reader_overflow, reads = copy.reader_overflow or {}, copy.reads[g]
    assert reads is not None
    for at, count in enumerate(before, first):
        more = reader_overflow.get((g, start + at), 0) if count == _CROWD else 0
        if more:
            reads[at] = _CROWD
            reader_overflow[g, start + at] = more - 1
            if more == 1:
                del reader_overflow[g, start + at]
