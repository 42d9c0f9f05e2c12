"""Eviction of groups that are not closed (windows, snapshots): page by page, whoever is not read may go.

Two queues a group and tier. The first holds what stands between: pages no leaf, branch point or snapshot has in its
window. Only when nothing of that is left, the second gives up the windows themselves. Both in order of last use.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .node import Copy, Node
    from .tree import Tree

_Heap = list[tuple[int, int, "Node"]]


class LooseQueue:
    """Which nodes may have pages of one group in one tier to give, in what order. At most one entry a node and heap."""

    __slots__ = ("bits", "g", "heaps", "slot", "stale", "tier", "treasures", "tree")

    def __init__(self, tree: Tree, g: int, tier: int, number: int) -> None:
        self.tree = tree
        self.g = g
        self.tier = tier
        family = tree.families[g]
        self.slot = family.shape == "slot"
        self.treasures = 0 if self.slot else family.treasures()
        self.heaps: tuple[_Heap, _Heap] = ([], [])
        self.stale = [0, 0]  # entries of nodes that are gone
        self.bits = (2 << (2 * number), 4 << (2 * number))

    def add(self, node: Node, copy: Copy) -> None:
        """`node` may have something to give: new pages, or some that lost their reader or their protection."""
        bit = self.bits[0]
        if not copy.queued & bit:
            copy.queued |= bit
            heappush(self.heaps[0], (copy.used, node.seq, node))

    def _push(self, node: Node, copy: Copy, heap: int) -> None:
        if not copy.queued & self.bits[heap]:
            copy.queued |= self.bits[heap]
            heappush(self.heaps[heap], (copy.used, node.seq, node))

    def evict(self, need: int) -> None:
        """Free `need` pages. The caller has seen that there are that many (`PagePool.idle`)."""
        tree, g, tier = self.tree, self.g, self.tier
        for which, heap in enumerate(self.heaps):
            while need > 0 and heap:
                used, _, node = heap[0]
                if node.parent is None:
                    heappop(heap)
                    self.stale[which] -= 1
                    continue
                copy: Copy = node.host if tier else node.device  # type: ignore[assignment]
                if copy.used > used and copy.pages[g]:
                    heapreplace(heap, (copy.used, node.seq, node))
                    continue
                heappop(heap)
                copy.queued &= ~self.bits[which]
                if not copy.pages[g]:
                    continue
                if self.slot:
                    if not tree.pools[tier][g].readers[copy.pages[g]]:
                        tree.drop_slot(node, tier, g)
                        tree.count_evicted(node, tier, g, 1)
                        need -= 1
                        tree.sweep_evicted(node)
                    continue
                need -= self._take(node, copy, which, need)
        assert need <= 0, "more was idle than could be found"

    def _take(self, node: Node, copy: Copy, which: int, need: int) -> int:
        tree, g, tier = self.tree, self.g, self.tier
        pages = np.frombuffer(copy.pages[g], np.int32)
        idle = (pages != 0) & (tree.pools[tier][g].readers[pages] == 0)
        protected = 0
        if which == 0 and self.treasures:
            protected = min(self._protected(node), node.n)
        columns = idle[: node.n - protected].nonzero()[0]
        chosen = columns[:need] if which == 0 else columns[::-1][:need][::-1]
        del pages
        taken = tree.drop_loose(node, tier, g, chosen)
        if taken < len(columns):
            self._push(node, copy, which)
        elif which == 0 and protected and idle[node.n - protected :].any():
            self._push(node, copy, 1)
        if not np.frombuffer(copy.pages[g], np.int32).any():
            copy.pages[g] = None
            tree.sweep_evicted(node)
        return taken

    def _protected(self, node: Node) -> int:
        """How many pages at the end of `node` lie in the window of a leaf, a branch point or a snapshot below."""
        away, at = 0, node
        while away < self.treasures:
            if len(at.children) != 1 or any(
                self.tree.copy_in(at, t).pages[s] for s in self.tree.slots for t in self.tree.tiers
            ):
                return self.treasures - away
            at = next(iter(at.children.values()))
            away += at.n
        return 0

    def lost(self, copy: Copy) -> None:
        """The node of `copy` has left the tree; when most entries are of such nodes, they are thrown out."""
        for which, bit in enumerate(self.bits):
            if copy.queued & bit:
                self.stale[which] += 1
                heap = self.heaps[which]
                if self.stale[which] * 2 > len(heap) + 64:
                    heap[:] = [entry for entry in heap if entry[2].alive]
                    heapify(heap)
                    self.stale[which] = 0
