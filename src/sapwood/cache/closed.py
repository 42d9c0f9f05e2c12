"""Closed pages: a page is worth nothing without all pages before it, so they come in order and go by the leaves.

All closed groups of a model go together: on the device a node has all of its pages or none, on host its first `count`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .events import announce_removed
from .group import DEVICE, HOST
from .page_ids import Ids, Ranges, as_ids, part, width
from .pool import FLIGHT, TREE

if TYPE_CHECKING:
    from .node import Copy, Node
    from .transfer import Transfer
    from .tree import Tree


class ClosedPages:
    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def split(self, upper: Node, lower: Node, tier: int) -> None:
        """A node has been cut: its upper half takes its pages. Queues come when all of the copy is divided."""
        k, top, low = upper.n, upper.copies[tier], lower.copies[tier]
        top.count = min(low.count, k)
        low.count -= top.count
        top.backed_children = 1 if low.count else 0
        for g in self.tree.closed:
            pages = low.pages[g]
            top.pages[g] = bytes(part(pages, 0, k))
            low.pages[g] = part(pages, k)
        self.enqueue_if_leaf(upper, tier)

    def put(self, node: Node, tier: int, pages: dict[int, bytes]) -> None:
        """Give a node (or the rest of it, on host) its pages in a tier. The caller moves them to the tree."""
        copy = node.copies[tier]
        added = 0
        for g in self.tree.closed:
            added = width(pages[g])
            copy.pages[g] = pages[g] if not copy.count else bytes(copy.pages[g]) + pages[g]
        if not added:
            return
        if not copy.count and node.parent is not None:
            node.parent.copies[tier].backed_children += 1
        copy.count += added
        if not copy.holds:
            self.tree.tiers[tier].leaves.evictable += added
            self.enqueue_if_leaf(node, tier)

    def land(self, transfer: Transfer, g: int) -> Ranges:
        """What came, of all closed groups, stands behind what a node has in that tier. On the device a node takes it
        whole or not at all; on host a gap before it becomes a node of its own. What is there already is freed.
        Returns the columns of the path that took theirs."""
        tree, tier = self.tree, transfer.tier
        kept: Ranges = []
        for begin, end in transfer.ranges[g]:
            for node, first, last in tree.cover(transfer.node, begin, end):
                count, low, high = node.copies[tier].count, node.start + first, node.start + last
                if tier == DEVICE and (count or last - first < node.n):  # it was computed meanwhile
                    count = last
                if count > first:
                    self._release(transfer, low, min(node.start + count, high))
                    low = node.start + count
                    if low >= high:
                        continue
                elif count < first:
                    tree.split(node, first)
                came = {each: transfer.came_for(each, [(low, high)]) for each in tree.closed}
                self.put(node, tier, came)
                kept.append((low, high))
        kept.sort()
        for each in tree.closed:
            tree.tiers[tier].pools[each].move(transfer.came_for(each, kept), FLIGHT, TREE)
        return kept

    def _release(self, transfer: Transfer, low: int, high: int) -> None:
        for g in self.tree.closed:
            self.tree.tiers[transfer.tier].pools[g].release(transfer.came_for(g, [(low, high)]), FLIGHT)

    def free_from(self, node: Node, tier: int, keep: int) -> None:
        """Free the pages of `node` in a tier from its page `keep` on."""
        tree, copy = self.tree, node.copies[tier]
        n = copy.count - keep
        if n <= 0:
            return
        if tree.announcing and tree.announced_group in tree.closed:
            announce_removed(tree, node, tier, range(keep, copy.count))
        for g in tree.closed:
            pages = copy.pages[g]
            tree.tiers[tier].pools[g].release(part(pages, keep), TREE)
            copy.pages[g] = part(pages, 0, keep)
            tree.count_evicted(node, tier, g, n)
        self.shrunk(node, tier, keep)

    def shrunk(self, node: Node, tier: int, keep: int) -> None:
        """`node` has its first `keep` pages left in a tier."""
        copy = node.copies[tier]
        if not copy.holds:
            self.tree.tiers[tier].leaves.evictable -= copy.count - keep
        copy.count = keep
        if not keep and node.parent is not None:
            node.parent.copies[tier].backed_children -= 1
            self.enqueue_if_leaf(node.parent, tier)

    def rest(self, node: Node) -> None:
        """A growing list of pages keeps room to grow; one that rests gives it back."""
        for copy in node.copies:
            for g in self.tree.closed:
                copy.pages[g] = bytes(copy.pages[g])

    def enqueue_if_leaf(self, node: Node, tier: int) -> None:
        copy = node.copies[tier]
        if copy.count and not copy.backed_children and not copy.holds:
            self.tree.tiers[tier].leaves.add(node, copy)

    def whole(self, node: Node, tier: int) -> int:
        """To which depth of the path to `node` a tier has every page."""
        depth, at = node.end, node
        while at.parent is not None:
            count = at.copies[tier].count
            if count < at.n:
                depth = at.start + count
            at = at.parent
        return depth

    def ids(self, copy: Copy, g: int) -> Ids:
        return as_ids(copy.pages[g])

    def columns(self, node: Node, tier: int, g: int) -> Ids:
        """Which pages of `node`, from its start, are in a tier."""
        return np.arange(node.copies[tier].count, dtype=np.int32)

    # ---- eviction

    def evict(self, tier: int, need: int) -> None:
        """Free `need` pages of a tier: whole leaves in the order of eviction, and the last one trimmed. The caller has
        seen that there are that many (`LeafQueue.evictable`)."""
        tree = self.tree
        while need > 0:
            node = tree.tiers[tier].leaves.next_leaf(tier)
            if tier == DEVICE and tree.has_host and 0 < node.copies[HOST].count < node.n:
                tree.split(node, node.copies[HOST].count)  # the part that is on the device alone goes first
            copy = node.copies[tier]
            take = min(need, copy.count)
            need -= take
            self._evict_tail(node, tier, copy.count - take)

    def _evict_tail(self, node: Node, tier: int, keep: int) -> None:
        """Take the pages from `keep` on out of a tier, and out of the tree where they are nowhere else."""
        tree = self.tree
        elsewhere = sum([copy.count for copy in node.copies]) > node.copies[tier].count
        if not elsewhere and not (node.copies[DEVICE].holds or (tier and node.children)):
            tree.prune_below(node)
            if not keep:
                tree.prune(node)
                return
            tree.truncate(node, keep)
        elif keep and not (tier and elsewhere):
            upper = tree.split(node, keep)
            self.free_from(node, tier, 0)
            self.enqueue_if_leaf(upper, tier)
            return
        else:
            tree.version += 1
            self.free_from(node, tier, keep)
        self.enqueue_if_leaf(node, tier)
