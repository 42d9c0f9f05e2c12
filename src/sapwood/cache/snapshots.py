"""Snapshots in the tree: at which depths of a node they stand, in what order they are used, how they come and go.

By group of slots, `Copy.pages` has the slot for every depth at which a snapshot stands, in order. All groups of slots
share `Copy.seen`: by depth, the rank in the order of eviction, what goes first at the front.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .events import announce_removed
from .eviction import EvictionOrder
from .page_ids import Ids, Ranges, one
from .pool import FLIGHT, TREE

if TYPE_CHECKING:
    from .node import Copy, Node
    from .transfer import Transfer
    from .tree import Tree


class Snapshots:
    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def split(self, upper: Node, lower: Node, tier: int) -> None:
        """A node has been cut: its upper half takes what stands there."""
        tree, top, low, end = self.tree, upper.copies[tier], lower.copies[tier], upper.end
        if not low.seen:
            return
        top.seen = {depth: rank for depth, rank in low.seen.items() if depth <= end} or None
        low.seen = {depth: rank for depth, rank in low.seen.items() if depth > end} or None
        for g in tree.slots:
            slots = low.pages[g]
            if slots:
                top.pages[g] = {depth: slot for depth, slot in slots.items() if depth <= end} or None
                low.pages[g] = {depth: slot for depth, slot in slots.items() if depth > end} or None
                if top.pages[g]:
                    tree.tiers[tier].queues[g].add(upper, top)

    def put(self, node: Node, tier: int, g: int, depth: int, slot: int) -> bool:
        """A snapshot in flight becomes the tree's, at `depth` in `node`; it is freed if there is one already."""
        pool, copy = self.tree.tiers[tier].pools[g], node.copies[tier]
        slots = copy.pages[g]
        if not slots:
            copy.pages[g] = {depth: slot}
        elif depth in slots:
            pool.release(one(slot), FLIGHT)
            return False
        else:
            in_order = next(reversed(slots)) < depth
            slots[depth] = slot
            if not in_order:
                copy.pages[g] = dict(sorted(slots.items()))
        pool.move(one(slot), FLIGHT, TREE)
        pool.idle += 1
        self.use(copy, depth)
        self.tree.tiers[tier].queues[g].add(node, copy)
        return True

    def land(self, transfer: Transfer, g: int) -> Ranges:
        """The snapshots that came stand where they belong, if none does there. Returns behind which pages they do."""
        kept: Ranges = []
        slots = iter(memoryview(transfer.came[g]).cast("i"))
        for low, high in transfer.ranges[g]:
            for depth in range(low + 1, high + 1):
                node = self.tree.node_at(transfer.node, depth)
                if self.put(node, transfer.tier, g, depth, next(slots)):
                    kept.append((depth - 1, depth))
        return kept

    def use(self, copy: Copy, depth: int) -> None:
        """The snapshot at `depth` is used now."""
        seen, now = copy.seen, self.tree.clock.now
        if not seen:
            copy.seen = {depth: EvictionOrder.rank(now, now)}
            return
        seen[depth] = EvictionOrder.rank(now, seen.pop(depth, now))

    def drop(self, node: Node, tier: int, g: int, depth: int) -> None:
        """Free the snapshot at `depth`. Nothing may read it."""
        tree, copy = self.tree, node.copies[tier]
        slot = copy.pages[g].pop(depth)
        assert copy.seen is not None
        if all(depth not in (copy.pages[other] or ()) for other in tree.slots):
            del copy.seen[depth]
            for sliding in tree.sliding:  # the window before it may stand between others now
                tree.sliding_pages[sliding].enqueue(node, tier)
        if tree.announcing and g == tree.announced_group:
            announce_removed(tree, node, tier, range(depth - node.start - 1, depth - node.start))
        tree.tiers[tier].pools[g].release(one(slot), TREE)
        tree.tiers[tier].pools[g].idle -= 1
        tree.version += 1

    def free_from(self, node: Node, tier: int, keep: int) -> None:
        """Free the snapshots that stand in `node` behind its page `keep`."""
        for g in self.tree.slots:
            for depth in [depth for depth in node.copies[tier].pages[g] or () if depth > node.start + keep]:
                self.drop(node, tier, g, depth)
                self.tree.count_evicted(node, tier, g, 1)

    def depths(self, node: Node) -> list[int]:
        """The depths at which snapshots of any group and tier stand in `node`, in order."""
        return sorted({depth for copy in node.copies if copy.seen for depth in copy.seen}) if self.tree.slots else []

    def ids(self, copy: Copy, g: int) -> Ids:
        return np.array([*(copy.pages[g] or {}).values()], np.int32)

    def columns(self, node: Node, tier: int, g: int) -> Ids:
        """Behind which pages of `node`, from its start, snapshots of a group stand in a tier."""
        return np.array([depth - node.start - 1 for depth in node.copies[tier].pages[g] or ()], np.int32)
