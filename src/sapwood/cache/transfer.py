"""Transfers between device and host: book-keeping only, no byte moves here.

A transfer pins what it reads and owns what it writes until it is acknowledged. It speaks of absolute pages of a path,
so a node may be split or grow meanwhile. Its copy is visible only after the acknowledgement; a failed one frees.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .announce import tell_stored
from .lease import Holder, Lease
from .namespace import Namespace
from .node import Node
from .pool import FLIGHT, TREE, Ids
from .publish import runs
from .tree import Tree

Parts = dict[int, tuple[Ids, Ids]]


class Operation(NamedTuple):
    """What a caller carries out: for each group, source and target pages from `start_page` on; 0 = no part there."""

    op: int
    namespace: Namespace
    start_page: int
    pages: dict[str, tuple[Ids, Ids]]


class Transfer:
    """One save or load between its begin and its acknowledgement."""

    __slots__ = ("after", "first", "holder", "last", "node", "op", "parts", "tier", "waiters")

    def __init__(self, op: int, tier: int, node: Node, first: int, last: int, parts: Parts, holder: Holder) -> None:
        self.op = op
        self.tier = tier  # where it writes
        self.node = node
        self.first = first
        self.last = last
        self.parts = parts
        self.holder = holder
        self.waiters: list[Lease] = []
        self.after: list[Transfer] = []  # loads further down the path that arrived before this one


class Ledger:
    """Transfers under way, and how what they bring is put into the tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.pending: dict[int, Transfer] = {}
        self.next_op = 1
        self.counts = {
            "saves": 0,
            "saves_failed": 0,
            "saves_skipped": 0,
            "loads": 0,
            "loads_failed": 0,
            "loads_joined": 0,
            "pages_saved": 0,
            "pages_loaded": 0,
        }

    def begin(self, tier: int, node: Node, first: int, last: int, parts: Parts, holder: Holder) -> Operation:
        op = self.next_op
        self.next_op += 1
        self.pending[op] = Transfer(op, tier, node, first, last, parts, holder)
        node.moving += 1
        self.counts["saves" if tier else "loads"] += 1
        names = self.tree.groups
        return Operation(op, node.root.namespace, first, {names[g].name: arrays for g, arrays in parts.items()})

    def end(self, op: int, tier: int) -> Transfer:
        transfer = self.pending.get(op)
        if transfer is None or transfer.tier != tier:
            raise ValueError(f"no {'save' if tier else 'load'} with number {op!r} is under way")
        del self.pending[op]
        return transfer

    def let_go(self, transfer: Transfer) -> None:
        transfer.node.moving -= 1
        transfer.holder.let_go(self.tree)

    def count(self, transfer: Transfer, what: str, pages: int) -> None:
        self.counts[f"pages_{what}"] += pages
        transfer.node.root.tally[f"{what}_pages"] += pages

    def free_targets(self, transfer: Transfer) -> None:
        for g, (_, targets) in transfer.parts.items():
            self.tree.pools[transfer.tier][g].release(targets[targets != 0], FLIGHT)

    def free_columns(self, transfer: Transfer, low: int, high: int) -> None:
        """Give back the targets of closed groups for pages [low, high): they are there already."""
        for g in self.tree.closed:
            ids = transfer.parts[g][1][low - transfer.first : high - transfer.first]
            self.tree.pools[transfer.tier][g].release(ids[ids != 0], FLIGHT)

    def land_loose(self, node: Node, tier: int, g: int, columns: Ids, ids: Ids) -> list[tuple[int, int]]:
        """Put pages into the holes of a path; where one was filled meanwhile, free. Returns the filled ranges."""
        tree = self.tree
        pool = tree.pools[tier][g]
        kept: list[tuple[int, int]] = []
        first, last = int(columns[0]), int(columns[-1]) + 1
        for at, low, high in tree.cover(node, first, last):
            copy = tree.copy_in(at, tier)
            if last - first == len(columns):
                a = at.start + low - first
                where, pages = np.arange(low, high, dtype=np.int32), ids[a : a + high - low]
            else:
                inside = (columns >= at.start + low) & (columns < at.start + high)
                where, pages = columns[inside] - at.start, ids[inside]
                if not len(where):
                    continue
            if copy.pages[g] is None:
                copy.pages[g] = bytearray(4 * at.n)
            view = np.frombuffer(copy.pages[g], np.int32)
            taken = view[where]
            if taken.any():
                pool.release(pages[taken != 0], FLIGHT)
                where, pages = where[taken == 0], pages[taken == 0]
            view[where] = pages
            pool.move(pages, FLIGHT, TREE)
            pool.idle += len(pages)
            tree.queues[g, tier].add(at, copy)
            kept += [(x + at.start, y + at.start) for x, y in runs(where)]
        return kept

    def land_slot(self, node: Node, tier: int, g: int, columns: Ids, ids: Ids) -> list[tuple[int, int]]:
        kept = []
        for column, slot in zip(columns.tolist(), ids, strict=True):
            at = self.tree.node_ending(node, column + 1)
            if put_slot(self.tree, at, tier, g, int(slot)):
                kept.append((column, column + 1))
        return kept

    def announce(self, node: Node, tier: int, ranges: list[tuple[int, int]]) -> None:
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


def spread(columns: Ids, ids: Ids, first: int, last: int) -> Ids:
    """`ids` at their columns in an array for the pages [first, last), 0 elsewhere."""
    if len(ids) == last - first:
        return ids
    array = np.zeros(last - first, np.int32)
    array[columns - first] = ids
    return array


def put_slot(tree: Tree, node: Node, tier: int, g: int, slot: int) -> bool:
    """A snapshot in flight becomes the tree's at the end of `node`; it is freed if there is one already."""
    pool = tree.pools[tier][g]
    ids = np.array([slot], np.int32)
    copy = tree.copy_in(node, tier)
    if copy.pages[g]:
        pool.release(ids, FLIGHT)
        return False
    pool.move(ids, FLIGHT, TREE)
    pool.idle += 1
    copy.pages[g] = slot
    tree.queues[g, tier].add(node, copy)
    return True
