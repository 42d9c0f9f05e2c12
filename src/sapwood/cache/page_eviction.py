"""Eviction of groups that are not closed (windows, snapshots): page by page, whoever is not read may go.

A queue a group and tier, with a heap for each worth (begins.py): first what stands between goes, then what is near the
end of a prompt, and only when nothing of that is left the windows themselves. Each in order of last use.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

import numpy as np

from .begins import WINDOW, worth
from .slots import drop_slot

if TYPE_CHECKING:
    from .node import Copy, Node
    from .tree import Tree

_Heap = list[tuple[int, int, "Node"]]


class PageEvictionQueue:
    """Which nodes may have pages of one group in one tier to give, in what order. At most one entry a node and heap."""

    __slots__ = ("alike", "bits", "g", "heaps", "slot", "stale", "tier", "tree")

    def __init__(self, tree: Tree, g: int, tier: int, number: int) -> None:
        self.tree = tree
        self.g = g
        self.tier = tier
        family = tree.families[g]
        self.slot = family.shape == "slot"
        self.alike = self.slot or not family.protected_tail_pages()  # no page is worth more than another
        self.heaps: tuple[_Heap, _Heap, _Heap] = ([], [], [])  # by worth
        self.stale = [0, 0, 0]  # entries of nodes that are gone
        self.bits = (2 << (3 * number), 4 << (3 * number), 8 << (3 * number))

    def add(self, node: Node, copy: Copy) -> None:
        """`node` may have something to give: new pages, or some that lost their reader or their protection."""
        bit = self.bits[0]
        if not copy.queued & bit:
            copy.queued |= bit
            used = next(iter(copy.seen.values())) if self.slot and copy.seen else copy.used
            heappush(self.heaps[0], (used, node.seq, node))

    def _push(self, node: Node, copy: Copy, heap: int) -> None:
        if not copy.queued & self.bits[heap]:
            copy.queued |= self.bits[heap]
            heappush(self.heaps[heap], (copy.used, node.seq, node))

    def evict(self, need: int) -> None:
        """Free `need` pages. The caller has seen that there are that many (`PagePool.idle`)."""
        g, tier = self.g, self.tier
        for which, heap in enumerate(self.heaps):
            while need > 0 and heap:
                used, _, node = heap[0]
                if node.parent is None:
                    heappop(heap)
                    self.stale[which] -= 1
                    continue
                copy: Copy = node.host if tier else node.device  # type: ignore[assignment]
                if self.slot:
                    need -= self._take_slot(node, copy, used)
                    continue
                if copy.used > used and copy.pages[g]:
                    heapreplace(heap, (copy.used, node.seq, node))
                    continue
                heappop(heap)
                copy.queued &= ~self.bits[which]
                if not copy.pages[g]:
                    continue
                need -= self._take(node, copy, which, need)
        assert need <= 0, "more was idle than could be found"

    def _take_slot(self, node: Node, copy: Copy, used: int) -> int:
        """`node` stands first in the queue, for a snapshot last used at `used`, if it still has it. Let go of its
        oldest one that nobody reads, or put the node where that one belongs."""
        tree, g, tier, heap = self.tree, self.g, self.tier, self.heaps[0]
        idle = self._idle_slots(copy)
        oldest, following = next(idle, 0), 0
        if oldest:
            assert copy.seen is not None
            if copy.seen[oldest] > used:
                heapreplace(heap, (copy.seen[oldest], node.seq, node))
                return 0
            following = next(idle, 0)
            if following:
                heapreplace(heap, (copy.seen[following], node.seq, node))
            drop_slot(tree, node, tier, g, oldest)
            tree.count_evicted(node, tier, g, 1)
        if not following:
            heappop(heap)
            copy.queued &= ~self.bits[0]
            if oldest:
                tree.sweep_evicted(node)
        return 1 if oldest else 0

    def _idle_slots(self, copy: Copy) -> Iterator[int]:
        """Where snapshots stand that nobody reads, the least recently used first."""
        slots, reads = copy.pages[self.g], self.tree.pools[self.tier][self.g].readers
        for depth in copy.seen or ():
            if slots and depth in slots and not reads[slots[depth]]:
                yield depth

    def _take(self, node: Node, copy: Copy, which: int, need: int) -> int:
        tree, g, tier = self.tree, self.g, self.tier
        pages = np.frombuffer(copy.pages[g], np.int32)
        idle = pages != 0
        reads = copy.reads[g]
        if reads is not None:
            idle[: len(reads)] &= np.frombuffer(bytes(reads), np.uint8)[: len(pages)] == 0
        worths = np.zeros(len(idle), np.uint8) if self.alike else worth(tree, g, node)[: len(idle)]
        columns = (idle & (worths <= which)).nonzero()[0]
        chosen = columns[::-1][:need][::-1] if which == WINDOW else columns[:need]
        del pages
        taken = tree.drop_sliding(node, tier, g, chosen)
        if taken < len(columns):
            self._push(node, copy, which)
        elif (more := worths[idle & (worths > which)]).size:
            self._push(node, copy, int(more.min()))
        if not np.frombuffer(copy.pages[g], np.int32).any():
            copy.pages[g] = None
            tree.sweep_evicted(node)
        return taken

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
