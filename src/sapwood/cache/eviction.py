"""What is evicted, and in what order: leaves of closed groups, and pages of all others one by one.

The order itself is one small class, `EvictionOrder`. Closed groups go leaf by leaf (`LeafQueue`). Windows and snapshots
go page by page, those that nothing reads (`PageQueue`): a heap for each worth (sliding.py), so that first what stands
between goes, then what is near the end of a prompt, and only when nothing of that is left the windows themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Final

import numpy as np

from .sliding import WINDOW

if TYPE_CHECKING:
    from .node import Copy, Node
    from .tree import Tree

Entry = tuple[int, int, "Node"]
_IN_LEAF_QUEUE: Final = 1  # a bit of `Copy.queued`; those behind it are of the page queues


class UseClock:
    """The cache's time: how many steps are over. Pages, snapshots and ghosts remember it as the time of their last use;
    nothing here knows seconds."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0

    def step_over(self) -> None:
        self.now += 1


class EvictionOrder:
    """Least recently used first; of two last used in the same step, the older node.

    A copy of a node has a rank (`Copy.used`), and so has every snapshot in it: the smaller goes first. Each use gives
    a new rank, which must not be smaller. An entry in a queue whose rank is out of date is put back when it comes up.
    """

    @staticmethod
    def rank(now: int, before: int) -> int:
        """The rank of something that had the rank `before` and is used in step `now`."""
        return now

    @staticmethod
    def entry(rank: int, node: Node) -> Entry:
        return rank, node.seq, node


class LeafQueue:
    """The closed pages of one tier: how many could be evicted, and in what order their leaves go."""

    __slots__ = ("evictable", "heap", "stale")

    def __init__(self) -> None:
        self.evictable = 0  # exact: closed pages in nodes without holds
        self.heap: list[Entry] = []  # at most one a node
        self.stale = 0  # entries of nodes that are gone

    def add(self, node: Node, copy: Copy) -> None:
        """`node` has become a leaf of its tier that nothing holds."""
        if not copy.queued & _IN_LEAF_QUEUE:
            copy.queued |= _IN_LEAF_QUEUE
            heappush(self.heap, EvictionOrder.entry(copy.used, node))

    def next_leaf(self, tier: int) -> Node:
        """The leaf that goes next. It is in the queue no more."""
        while True:
            rank, _, node = heappop(self.heap)
            if node.parent is None:
                self.stale -= 1
                continue
            copy = node.copies[tier]
            copy.queued &= ~_IN_LEAF_QUEUE
            if copy.holds or copy.backed_children or not copy.count:
                continue
            if copy.used == rank:
                return node
            self.add(node, copy)

    def coldest(self, tier: int, most: int) -> list[Node]:
        """Leaves that would go next, in about their order; at most `most`. Takes nothing out."""
        found: list[Node] = []
        looked: list[Entry] = []
        while self.heap and len(found) < most and len(looked) < 4 * most:
            entry = heappop(self.heap)
            node = entry[2]
            if node.parent is None:
                self.stale -= 1
                continue
            looked.append(entry)
            copy = node.copies[tier]
            if copy.count and not copy.holds and not copy.backed_children:
                found.append(node)
        for entry in looked:
            heappush(self.heap, entry)
        return found

    def lost(self, copy: Copy) -> None:
        """The node of `copy` has left the tree; when most entries are of such nodes, they are thrown out."""
        if copy.queued & _IN_LEAF_QUEUE:
            self.stale += 1
            if _mostly_stale(self.heap, self.stale):
                self.stale = 0


def _mostly_stale(heap: list[Entry], stale: int) -> bool:
    """Throw the entries of nodes that are gone out of a heap, if they are most of it."""
    if stale * 2 <= len(heap) + 64:
        return False
    heap[:] = [entry for entry in heap if entry[2].parent is not None]
    heapify(heap)
    return True


class PageQueue:
    """Which nodes may have pages of one group in one tier to give. At most one entry a node and heap."""

    __slots__ = ("alike", "bits", "g", "heaps", "slot", "stale", "tier", "tree")

    def __init__(self, tree: Tree, g: int, tier: int, number: int) -> None:
        self.tree = tree
        self.g = g
        self.tier = tier
        family = tree.families[g]
        self.slot = family.shape == "slot"
        self.alike = self.slot or not family.protected_tail_pages()  # no page is worth more than another
        self.heaps: tuple[list[Entry], list[Entry], list[Entry]] = ([], [], [])  # by worth
        self.stale = [0, 0, 0]  # entries of nodes that are gone
        self.bits = (2 << (3 * number), 4 << (3 * number), 8 << (3 * number))

    def add(self, node: Node, copy: Copy) -> None:
        """`node` may have something to give: new pages, or some that lost their reader or their protection."""
        bit = self.bits[0]
        if not copy.queued & bit:
            copy.queued |= bit
            used = next(iter(copy.seen.values())) if self.slot and copy.seen else copy.used
            heappush(self.heaps[0], EvictionOrder.entry(used, node))

    def _push(self, node: Node, copy: Copy, heap: int) -> None:
        if not copy.queued & self.bits[heap]:
            copy.queued |= self.bits[heap]
            heappush(self.heaps[heap], EvictionOrder.entry(copy.used, node))

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
                copy = node.copies[tier]
                if self.slot:
                    need -= self._take_slot(node, copy, used)
                    continue
                if copy.used > used and copy.pages[g]:
                    heapreplace(heap, EvictionOrder.entry(copy.used, node))
                    continue
                heappop(heap)
                copy.queued &= ~self.bits[which]
                if not copy.pages[g]:
                    continue
                need -= self._take(node, copy, which, need)
        assert need <= 0, "more was idle than could be found"

    def _take_slot(self, node: Node, copy: Copy, used: int) -> int:
        """`node` stands first in the queue, for a snapshot last used at `used`, if it still has it. Let go of its
        oldest one without a reader, or put the node where that one belongs."""
        tree, g, tier, heap = self.tree, self.g, self.tier, self.heaps[0]
        idle = self._idle_slots(copy)
        oldest, following = next(idle, 0), 0
        if oldest:
            assert copy.seen is not None
            if copy.seen[oldest] > used:
                heapreplace(heap, EvictionOrder.entry(copy.seen[oldest], node))
                return 0
            following = next(idle, 0)
            if following:
                heapreplace(heap, EvictionOrder.entry(copy.seen[following], node))
            tree.snapshots.drop(node, tier, g, oldest)
            tree.count_evicted(node, tier, g, 1)
        if not following:
            heappop(heap)
            copy.queued &= ~self.bits[0]
            if oldest:
                tree.sweep_evicted(node)
        return 1 if oldest else 0

    def _idle_slots(self, copy: Copy) -> Iterator[int]:
        """Where snapshots without a reader stand, the least recently used first."""
        slots, reads = copy.pages[self.g], self.tree.tiers[self.tier].pools[self.g].readers
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
        known = bytes(len(idle)) if self.alike else tree.sliding_pages[g].worth(node)[: len(idle)]
        worths = np.frombuffer(known, np.uint8)
        columns = (idle & (worths <= which)).nonzero()[0]
        chosen = columns[::-1][:need][::-1] if which == WINDOW else columns[:need]
        del pages
        taken = tree.sliding_pages[g].drop(node, tier, chosen)
        if taken < len(columns):
            self._push(node, copy, which)
        elif (more := worths[idle & (worths > which)]).size:
            self._push(node, copy, int(more.min()))
        if not np.frombuffer(copy.pages[g], np.int32).any():
            copy.pages[g] = None
            tree.sweep_evicted(node)
        return taken

    def lost(self, copy: Copy) -> None:
        """The node of `copy` has left the tree."""
        for which, bit in enumerate(self.bits):
            if copy.queued & bit:
                self.stale[which] += 1
                if _mostly_stale(self.heaps[which], self.stale[which]):
                    self.stale[which] = 0
