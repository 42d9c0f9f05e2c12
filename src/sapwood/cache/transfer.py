"""Transfers between device and host: book-keeping only, no byte moves here.

A transfer pins what it reads and owns what it writes until it is acknowledged. It speaks of absolute pages of a path,
so a node may be split or grow meanwhile. Its copy is visible only after the acknowledgement; a failed one frees.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .announce import tell_stored
from .group import HOST
from .lease import Lease, PinHolder, read_held
from .namespace import Namespace
from .node import Node
from .pool import FLIGHT, TREE, Ids
from .readers import unread_columns
from .runs import Ranges, lengthened, picked, runs_of
from .tree import Cover, Tree, as_ids

Parts = dict[int, tuple[Ids, Ids]]
_new = tuple.__new__  # a NamedTuple in a third of the time


class Operation(NamedTuple):
    """What a caller carries out: for each group, source and target pages from `start_page` on; 0 = no part there."""

    op: int
    namespace: Namespace
    start_page: int
    pages: dict[str, tuple[Ids, Ids]]


class Transfer(PinHolder):
    """One save or load between its begin and its acknowledgement: a holder of what it reads."""

    __slots__ = ("after", "came", "first", "last", "op", "parts", "ranges", "tier", "waiters")

    def __init__(
        self,
        tree: Tree,
        op: int,
        tier: int,
        node: Node,
        columns: tuple[int, int],
        parts: Parts,
        where: dict[int, Ranges],
        came: dict[int, bytes],
        tiers: tuple[int, ...],
        reads: dict[tuple[int, int], bytes],
        spans: dict[tuple[int, int], Ranges],
    ) -> None:
        read_held(tree, node, reads, {})
        PinHolder.__init__(self, tree, node, tiers, columns, reads, spans)
        if spans:
            self.counted, tree.uncounted[self] = False, None
        self.op = op
        self.tier = tier  # where it writes
        self.first, self.last = columns
        self.parts = parts
        self.ranges = where  # by group: which pages are moved
        self.came = came  # by group: the pages they are moved to, one after the other
        self.waiters: list[Lease] = []
        self.after: list[Transfer] = []  # loads further down the path that arrived before this one

    def covers(self, g: int, column: int) -> bool:
        return any(low <= column < high for low, high in self.ranges.get(g, ()))


class PendingTransfers:
    """Transfers under way, and how what they bring is put into the tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.pending: dict[int, Transfer] = {}
        self.next_op = 1
        self.counts = {
            "saves": 0,
            "saves_failed": 0,
            "saves_skipped": 0,
            "pages_skipped": 0,
            "loads": 0,
            "loads_failed": 0,
            "loads_joined": 0,
            "pages_saved": 0,
            "pages_loaded": 0,
            "fetches": 0,
            "fetches_failed": 0,
            "fetches_skipped": 0,
            "pages_fetched": 0,
            "stays": 0,
            "backups": 0,
            "backups_failed": 0,
            "backups_dropped": 0,
        }

    def number(self) -> int:
        """A number for an operation of any kind: there is one sequence for all of them."""
        op = self.next_op
        self.next_op += 1
        return op

    def begin(self, transfer: Transfer) -> Operation:
        """From now on it is under way."""
        self.pending[transfer.op] = transfer
        self.counts["saves" if transfer.tier else "loads"] += 1
        names = self.tree.groups
        pages = {names[g].name: arrays for g, arrays in transfer.parts.items()}
        return _new(Operation, (transfer.op, transfer.root.namespace, transfer.first, pages))

    def end(self, op: int, tier: int) -> Transfer:
        transfer = self.pending.get(op)
        if transfer is None or transfer.tier != tier:
            raise ValueError(f"no {'save' if tier else 'load'} with number {op!r} is under way")
        del self.pending[op]
        return transfer

    def count(self, transfer: Transfer, what: str, pages: int) -> None:
        """Pages that came, of any group."""
        self.counts[f"pages_{what}"] += pages
        transfer.node.root.tally[f"{what}_pages"] += pages

    def free_targets(self, transfer: Transfer) -> None:
        for g, raw in transfer.came.items():
            self.tree.tiers[transfer.tier].pools[g].give(raw, FLIGHT)

    def free_columns(self, transfer: Transfer, low: int, high: int) -> None:
        """Give back the targets of closed groups for pages [low, high): they are there already."""
        for g in self.tree.closed:
            ids = picked(transfer.ranges[g], transfer.came[g], [(low, high)])
            self.tree.tiers[transfer.tier].pools[g].give(ids, FLIGHT)

    def tree_owns(self, transfer: Transfer, g: int, kept: Ranges) -> None:
        """The pages of a group that came for the ranges `kept` are the tree's now."""
        if kept:
            ids = picked(transfer.ranges[g], transfer.came[g], kept)
            self.tree.tiers[transfer.tier].pools[g].hand(ids, FLIGHT, TREE)

    def land_loose(self, transfer: Transfer, g: int, where: Ranges, path: Cover) -> Ranges:
        """Put pages into the holes of a path; where one was filled meanwhile, free. Returns the filled ranges.
        `path` is what the whole transfer covers."""
        tree, tier = self.tree, transfer.tier
        raw = transfer.came[g]
        kept: Ranges = []
        for begin, end in where:
            whole = begin == transfer.first and end == transfer.last
            for at, low, high in path if whole else tree.cover(transfer.node, begin, end):
                column = at.start + low
                ids = raw[4 * (column - begin) : 4 * (column - begin + high - low)]
                if self._land_run(g, at, tier, low, high, ids):
                    kept.append((column, column + high - low))
                else:
                    kept += self._land_in_holes(g, at, tier, low, high, as_ids(ids))
            raw = raw[4 * (end - begin) :]
        if len(kept) > 1:
            kept.sort()
        return kept

    def _land_run(self, g: int, node: Node, tier: int, low: int, high: int, ids: bytes) -> bool:
        """Put pages into [low, high) of `node`, if nothing is there."""
        tree = self.tree
        copy = node.copies[tier]
        pool, pages = tree.tiers[tier].pools[g], copy.pages[g]
        if pages is None or len(pages) < 4 * low:
            pages = copy.pages[g] = lengthened(pages, low)
        elif any(pages[4 * low : 4 * high]):
            return False
        pages[4 * low : 4 * high] = ids
        pool.hand(ids, FLIGHT, TREE)
        pool.idle += unread_columns(copy, g, low, high)
        tree.tiers[tier].queues[g].add(node, copy)
        return True

    def _land_in_holes(self, g: int, node: Node, tier: int, low: int, high: int, ids: Ids) -> Ranges:
        """`_land_run` where some are there already: those that came for them are freed. Returns where others went."""
        tree = self.tree
        begin, copy, pool = node.start + low, node.copies[tier], tree.tiers[tier].pools[g]
        pages = copy.pages[g] = lengthened(copy.pages[g], high)
        view = np.frombuffer(pages, np.int32)[low:high]
        taken = view != 0
        pool.release(ids[taken], FLIGHT)
        pool.move(ids[~taken], FLIGHT, TREE)
        view[~taken] = ids[~taken]
        filled = runs_of(~taken)
        for a, b in filled:
            pool.idle += unread_columns(copy, g, low + a, low + b)
        tree.tiers[tier].queues[g].add(node, copy)
        return [(begin + a, begin + b) for a, b in filled]

    def land_slot(self, transfer: Transfer, g: int, where: Ranges) -> Ranges:
        tree, tier, node = self.tree, transfer.tier, transfer.node
        kept: Ranges = []
        at = 0
        slots = memoryview(transfer.came[g]).cast("i")
        for low, high in where:
            for depth in range(low + 1, high + 1):
                place = node if node.start < depth else tree.node_at(node, depth)
                if tree.snapshots.put(place, tier, g, depth, slots[at]):
                    kept.append((depth - 1, depth))
                at += 1
        return kept

    def announce(self, node: Node, tier: int, ranges: Ranges) -> None:
        """Tell of ranges that came, those nearest the root first, neighbours in one breath."""
        if not self.tree.announcing or not ranges:
            return
        ranges.sort()
        first, last = ranges[0]
        for low, high in ranges[1:]:
            if low != last:
                tell_stored(self.tree, node, tier, first, last)
                first = low
            last = high
        tell_stored(self.tree, node, tier, first, last)


def host_runs(tree: Tree, node: Node, g: int, spans: Ranges) -> Ranges:
    """Where host has pages of a group that is not closed, within `spans` of the path to `node`."""
    return [
        (at.start + first + a, at.start + first + b)
        for low, high in spans
        for at, first, last in tree.cover(node, low, high)
        if (pages := at.copies[HOST].pages[g])
        for a, b in runs_of(as_ids(pages[4 * first : 4 * last]))
    ]
