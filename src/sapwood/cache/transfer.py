"""Transfers between device and host: book-keeping only, no byte moves here.

A transfer pins what it reads and owns what it writes until it is acknowledged. It speaks of absolute pages of a path,
so a node may be split or grow meanwhile. Its copy is visible only after the acknowledgement; a failed one frees.
"""

from __future__ import annotations

from typing import NamedTuple

from .events import announce_stored
from .eviction import EvictionOrder
from .group import HOST
from .lease import Lease, PinHolder, read_held
from .namespace import Namespace
from .node import Node
from .page_ids import Ids, Ranges, as_ids, pages_in, part, picked, runs_of
from .pool import FLIGHT
from .tree import Tree

Parts = dict[int, tuple[Ids, Ids]]


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

    def came_for(self, g: int, where: Ranges) -> bytes:
        """The pages that come for these ranges, which are some of those it moves."""
        return picked(self.ranges[g], self.came[g], where)

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
        return Operation(transfer.op, transfer.root.namespace, transfer.first, pages)

    def end(self, op: int, tier: int) -> Transfer:
        transfer = self.pending.get(op)
        if transfer is None or transfer.tier != tier:
            raise ValueError(f"no {'save' if tier else 'load'} with number {op!r} is under way")
        del self.pending[op]
        return transfer

    def free_targets(self, transfer: Transfer) -> None:
        for g, raw in transfer.came.items():
            self.tree.tiers[transfer.tier].pools[g].release(raw, FLIGHT)

    def land(self, transfer: Transfer, what: str) -> int:
        """What has come to a tier is the tree's now, or is freed where the tier has it already. Counted as `what`.
        Returns how many pages landed; those of closed groups, which come together, count once."""
        tree, tier, landed = self.tree, transfer.tier, 0
        announced: Ranges = []
        for g in transfer.ranges:
            if g in tree.closed[1:]:
                continue
            kept = tree.shape_of[g].land(transfer, g)
            landed += pages_in(kept)
            if g == tree.announced_group:
                announced = kept
        for node, _, _ in tree.cover(transfer.node, transfer.first, transfer.last):
            copy = node.copies[tier]
            copy.used = EvictionOrder.rank(tree.clock.now, copy.used)
        self.counts[f"pages_{what}"] += landed
        transfer.root.tally[f"{what}_pages"] += landed
        self._announce(transfer.node, tier, announced)
        return landed

    def _announce(self, node: Node, tier: int, ranges: Ranges) -> None:
        """Announce ranges that came, those nearest the root first, neighbours in one event."""
        if not self.tree.announcing or not ranges:
            return
        ranges.sort()
        first, last = ranges[0]
        for low, high in ranges[1:]:
            if low != last:
                announce_stored(self.tree, node, tier, first, last)
                first = low
            last = high
        announce_stored(self.tree, node, tier, first, last)


def host_runs(tree: Tree, node: Node, g: int, spans: Ranges) -> Ranges:
    """Where host has pages of a group that is not closed, within `spans` of the path to `node`."""
    return [
        (at.start + first + a, at.start + first + b)
        for low, high in spans
        for at, first, last in tree.cover(node, low, high)
        if (pages := at.copies[HOST].pages[g])
        for a, b in runs_of(as_ids(part(pages, first, last)))
    ]
