"""The prefix tree: its shape, its pins, and the pages of closed groups that live and die by its leaves.

Decides nothing about requests: it walks, splits, grows, prunes and gives room. Never recursive: a chain of a million
nodes is an ordinary tree.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from .announce import tell_removed
from .events import KVEvent
from .families import Family, family_class
from .ghosts import Ghosts
from .group import DEVICE, HOST, TIERS, CacheGroup
from .namespace import Namespace
from .node import Copy, Node, Root
from .page_eviction import PageEvictionQueue
from .path import Path, agree
from .pool import TREE, Ids, PagePool
from .slots import drop_slot, split_slots

_IN_LEAF_LRU = 1

Cover = list[tuple[Node, int, int]]  # nodes of a path, deepest first, and which of their own pages are meant


def as_ids(pages: bytes | bytearray) -> Ids:
    """Page ids from the bytes they are kept as. A copy: a view would forbid a bytearray to grow."""
    return np.frombuffer(bytes(pages), np.int32)


class LeafLru:
    """The closed pages of one tier: how many could be evicted, and in what order their leaves go."""

    __slots__ = ("evictable", "heap", "stale")

    def __init__(self) -> None:
        self.evictable = 0  # exact: closed pages in nodes without holds
        self.heap: list[tuple[int, int, Node]] = []  # (last used, sequence number, node); at most one entry a node
        self.stale = 0  # entries of nodes that are gone


class Tree:
    def __init__(
        self, page_size: int, groups: tuple[CacheGroup, ...], hashing: bool, announcing: bool, ghost_bytes: int
    ) -> None:
        self.page_size = page_size
        self.page_bytes = 4 * page_size
        self.groups = groups
        self.families: list[Family] = [family_class(g.family)(g, i, page_size) for i, g in enumerate(groups)]
        fams = self.families
        self.closed = [i for i, f in enumerate(fams) if f.closed]
        self.sliding = [i for i, f in enumerate(fams) if not f.closed and f.shape == "pages"]
        self.paged = self.closed + self.sliding
        self.waits_for_real = [i for i in self.closed if not fams[i].reads_promised]
        self.slots = [i for i, f in enumerate(fams) if f.shape == "slot"]
        self._no_pages: list[Any] = [b"" if f.closed else None for f in fams]
        self._no_reads: list[bytearray | None] = [None] * len(fams)
        self.has_host = any(g.host_pages for g in groups)
        self.tiers = (DEVICE, HOST) if self.has_host else (DEVICE,)
        self.pools = [
            [
                PagePool(f"{g.name} on {TIERS[t]}", g.host_pages if t else g.device_pages, g.page_bytes, not f.closed)
                for g, f in zip(groups, fams, strict=True)
            ]
            for t in self.tiers
        ]
        self.announced_group = self.closed[0] if self.closed else 0  # the group of which events speak
        self.leaf_lrus = [LeafLru() for _ in self.tiers]
        self.queues = {
            (i, t): PageEvictionQueue(self, i, t, k)
            for k, (i, t) in enumerate((i, t) for i in self.sliding + self.slots for t in self.tiers)
        }
        self.hashing = hashing or announcing
        self.announcing = announcing
        self.events: list[KVEvent] = []
        self.roots: dict[Namespace, Root] = {}
        self.detached_roots: dict[Root, None] = {}  # evicted namespaces that somebody still holds pages of
        self.ghosts = Ghosts(ghost_bytes)
        self.now = 0
        self.seq = 0
        self.version = 0  # changes whenever a path found earlier may no longer stand
        self.nodes = 0
        self.promises = 0  # made by steps in flight
        self.evicted = [[0] * len(groups) for _ in self.tiers]
        self.uncounted: dict[Any, None] = {}  # who reads windows and is not counted yet, see readers.py

    # ---- roots

    def root_of(self, namespace: Namespace) -> Root:
        root = self.roots.get(namespace)
        if root is None:
            root = Root(namespace)
            root.top = self._node(root, None, b"", 0, 0)
            root.top.crc = 0
            self.roots[namespace] = root
        return root

    def forget_if_empty(self, root: Root) -> None:
        """A namespace with nothing in it costs nothing."""
        if root in self.detached_roots and not root.holders:
            del self.detached_roots[root]
        if root.attached and not root.bound and not root.top.children and not root.holders:
            root.attached = False
            del self.roots[root.namespace]

    def _node(self, root: Root, parent: Node | None, edge: bytes | bytearray, start: int, n: int) -> Node:
        self.seq += 1
        pages, reads, now = self._no_pages, self._no_reads, self.now
        if not self.sliding:  # nobody will ever count readers there
            device = Copy(pages.copy(), now, reads)
            host = Copy(pages.copy(), now, reads) if self.has_host else None
        else:
            device = Copy(pages.copy(), now, reads.copy())
            host = Copy(pages.copy(), now, reads.copy()) if self.has_host else None
        return Node(root, parent, edge, start, n, self.seq, device, host)

    @staticmethod
    def copy_in(node: Node, tier: int) -> Copy:
        copy = node.host if tier else node.device
        assert copy is not None
        return copy

    # ---- walking

    def walk(self, root: Root, tokens: bytes) -> Path:
        """The deepest path of whole pages that agrees with `tokens`. Compares; never hashes a path, never pins."""
        node = root.top
        nodes: list[Node] = []
        offset = wrong = 0
        page_bytes = self.page_bytes
        matches = tokens.startswith
        while True:
            child = node.recent
            if child is None:
                break
            if not matches(child.edge, offset):
                child = node.children.get(tokens[offset : offset + page_bytes])
                if child is None:
                    break
                wrong += 1
                edge = child.edge
                if not matches(edge, offset):
                    nodes.append(child)
                    offset += agree(edge, tokens, offset, page_bytes) * page_bytes
                    break
            nodes.append(child)
            offset += len(child.edge)
            node = child
        path = Path(self, root, nodes, offset // page_bytes)
        path.wrong = wrong
        return path

    def path_to(self, node: Node) -> Path:
        """The path that ends with `node`."""
        nodes: list[Node] = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            nodes.append(at)
            at = at.parent
        nodes.reverse()
        return Path(self, node.root, nodes, node.end)

    # ---- shape

    def split(self, node: Node, k: int) -> Node:
        """Cut `node` after its first k pages. The new upper half is returned; the lower half stays `node`,
        so whoever is anchored at its end still is. Emits nothing, and keeps every hash."""
        assert 0 < k < node.n and node.parent is not None
        cut, parent = k * self.page_bytes, node.parent
        edge = node.edge
        upper = self._node(node.root, parent, bytes(memoryview(edge)[:cut]), node.start, k)
        parent.children[edge[: self.page_bytes] if isinstance(edge, bytes) else bytes(edge[: self.page_bytes])] = upper
        if parent.recent is node:
            parent.recent = upper
        node.edge = edge[cut:]
        node.parent = upper
        node.start += k
        node.n -= k
        upper.children[bytes(node.edge[: self.page_bytes])] = node
        upper.recent = node
        upper.loading = node.loading
        if node.promised:
            upper.promised = [p for p in node.promised if p.low < node.start] or None
            node.promised = [p for p in node.promised if p.last > node.start] or None
        if node.saving:
            upper.saving = [save for save in node.saving if save.first < node.start] or None
            node.saving = [save for save in node.saving if save.last > node.start] or None
        if node.prompt_end <= node.start:
            upper.prompt_end, node.prompt_end = node.prompt_end, 0
        if node.hashes is not None:
            upper.hashes, node.hashes = node.hashes[: 32 * k], node.hashes[32 * k :]
        for t in self.tiers:
            self._split_copy(upper, node, k, t)
        self.nodes += 1
        self.version += 1
        if not self.closed and self._bare(node):
            self.prune(node)  # tokens behind the last snapshot, of which nothing is left
        return upper

    def _split_copy(self, upper: Node, lower: Node, k: int, tier: int) -> None:
        top, low = self.copy_in(upper, tier), self.copy_in(lower, tier)
        top.used = low.used
        top.holds = 1 if low.holds else 0
        top.count = min(low.count, k)
        low.count -= top.count
        top.backed_children = 1 if low.count else 0
        for g in self.closed:
            pages = low.pages[g]
            top.pages[g] = bytes(pages[: 4 * k])
            low.pages[g] = pages[4 * k :]
        for g in self.sliding:
            pages = low.pages[g]
            if pages is not None:
                top.pages[g] = pages[: 4 * k]
                low.pages[g] = pages[4 * k :] or None
                self.queues[g, tier].add(upper, top)
            reads = low.reads[g]
            if reads is not None:
                top.reads[g], low.reads[g] = reads[:k], reads[k:]
        if low.reader_overflow:
            end = upper.start + k
            top.reader_overflow = {key: more for key, more in low.reader_overflow.items() if key[1] < end}
            low.reader_overflow = {key: more for key, more in low.reader_overflow.items() if key[1] >= end}
        if low.seen:
            split_slots(self, upper, top, low, tier)
        if top.count and not top.backed_children and not top.holds:
            self.enqueue_leaf(upper, top, tier)

    def attach(self, parent: Node, edge: bytes | bytearray, n: int) -> Node:
        """A new child of `parent`, with nothing in it yet."""
        node = self._node(parent.root, parent, edge, parent.start + parent.n, n)
        parent.children[bytes(edge[: self.page_bytes])] = node
        parent.recent = node
        self.nodes += 1
        for g in self.sliding:  # the parent is no leaf any more: its last window may now stand between others
            if parent.device.pages[g] is not None:
                self.queues[g, DEVICE].add(parent, parent.device)
            if parent.host is not None and parent.host.pages[g] is not None:
                self.queues[g, HOST].add(parent, parent.host)
        return node

    def node_ending(self, node: Node, depth: int) -> Node:
        """The ancestor (or `node` itself) that ends at `depth` on the path to `node`, split if it must be."""
        while node.start >= depth:
            assert node.parent is not None
            node = node.parent
        if node.start + node.n > depth:
            return self.split(node, depth - node.start)
        assert node.start + node.n == depth
        return node

    @staticmethod
    def node_at(node: Node, depth: int) -> Node:
        """The ancestor (or `node` itself) that has the page which ends at `depth` of the path to `node`."""
        while node.start >= depth:
            node = node.parent  # type: ignore[assignment]
        return node

    def cover(self, node: Node, low: int, high: int) -> Cover:
        """The parts (node, first, last) of the path to `node` that lie in pages [low, high), deepest first;
        first and last count from the node's own start."""
        start = node.start
        if low >= start:  # all of it in one node
            last = min(high - start, node.n)
            return [(node, low - start, last)] if low - start < last else []
        if high <= low:
            return []
        parts: Cover = []
        while True:
            if start < high:
                n = high - start
                parts.append((node, low - start if low > start else 0, n if n < node.n else node.n))
            if start <= low:
                return parts
            node = node.parent  # type: ignore[assignment]
            start = node.start

    @staticmethod
    def shared(one: Node, other: Node) -> int:
        """How many pages the paths to two nodes have in common."""
        while one is not other:
            if one.end < other.end:
                one, other = other, one
            one = one.parent  # type: ignore[assignment]
        return one.end

    # ---- pins

    def pin(self, node: Node, tier: int) -> None:
        """Hold the path to `node`. Climbs only to the first ancestor that is held already."""
        taken = 0
        at: Node | None = node
        while at is not None:
            copy: Copy = at.host if tier else at.device  # type: ignore[assignment]
            copy.holds += 1
            if copy.holds > 1:
                break
            taken += copy.count
            at = at.parent
        self.leaf_lrus[tier].evictable -= taken

    def unpin(self, node: Node, tier: int) -> None:
        """Let go of the path to `node`. What nobody holds any more was used just now."""
        now, freed = self.now, 0
        at: Node | None = node
        while at is not None:
            copy: Copy = at.host if tier else at.device  # type: ignore[assignment]
            copy.holds -= 1
            if copy.holds:
                break
            copy.used = now
            freed += copy.count
            if not copy.backed_children and copy.count:
                self.enqueue_leaf(at, copy, tier)
            at = at.parent
        self.leaf_lrus[tier].evictable += freed
        if at is not node and not node.children:
            if type(node.edge) is bytearray and not node.device.holds:
                self._rest(node)
            if not node.device.count:
                self.sweep(node)

    def _rest(self, node: Node) -> None:
        """A growing edge keeps room to grow; one that rests gives it back."""
        node.edge = bytes(node.edge)
        pages = node.device.pages
        for g in self.closed:
            pages[g] = bytes(pages[g])
        if node.host is not None:
            pages = node.host.pages
            for g in self.closed:
                pages[g] = bytes(pages[g])

    def enqueue_leaf(self, node: Node, copy: Copy, tier: int) -> None:
        if not copy.queued & _IN_LEAF_LRU:
            copy.queued |= _IN_LEAF_LRU
            heappush(self.leaf_lrus[tier].heap, (copy.used, node.seq, node))

    # ---- closed pages

    def put_closed(self, node: Node, tier: int, pages: dict[int, bytes]) -> None:
        """Give a node (or the rest of it, on host) its closed pages in a tier. The caller hands them to the tree."""
        copy = self.copy_in(node, tier)
        added = 0
        for g in self.closed:
            added = len(pages[g]) // 4
            copy.pages[g] = pages[g] if not copy.count else bytes(copy.pages[g]) + pages[g]
        if not added:
            return
        if not copy.count and node.parent is not None:
            self.copy_in(node.parent, tier).backed_children += 1
        copy.count += added
        if not copy.holds:
            self.leaf_lrus[tier].evictable += added
            if not copy.backed_children:
                self.enqueue_leaf(node, copy, tier)

    def _drop_closed(self, node: Node, tier: int, keep: int) -> None:
        """Free the closed pages of `node` in a tier from its page `keep` on."""
        copy = self.copy_in(node, tier)
        n = copy.count - keep
        if n <= 0:
            return
        if self.announcing and self.announced_group in self.closed:
            tell_removed(self, node, tier, range(keep, copy.count))
        for g in self.closed:
            pages = copy.pages[g]
            self.pools[tier][g].give(pages[4 * keep :], TREE)
            copy.pages[g] = pages[: 4 * keep]
            self.count_evicted(node, tier, g, n)
        copy.count = keep
        if not copy.holds:
            self.leaf_lrus[tier].evictable -= n
        if not keep and node.parent is not None:
            self.lost_kid(node.parent, tier)

    def lost_kid(self, parent: Node, tier: int) -> None:
        copy = self.copy_in(parent, tier)
        copy.backed_children -= 1
        if not copy.backed_children and copy.count and not copy.holds:
            self.enqueue_leaf(parent, copy, tier)

    def evict_closed(self, tier: int, need: int) -> None:
        """Free `need` closed pages of a tier: whole leaves, least recently used first, and the last one trimmed.
        The caller has seen that there are that many (`LeafLru.evictable`)."""
        lru = self.leaf_lrus[tier]
        while need > 0:
            used, _, node = heappop(lru.heap)
            if not node.alive:
                lru.stale -= 1
                continue
            copy = self.copy_in(node, tier)
            copy.queued &= ~_IN_LEAF_LRU
            if copy.holds or copy.backed_children or not copy.count:
                continue
            if copy.used > used:
                self.enqueue_leaf(node, copy, tier)
                continue
            if tier == DEVICE and node.host is not None and 0 < node.host.count < node.n:
                self.split(node, node.host.count)  # the part that is on the device alone goes first
            take = min(need, copy.count)
            need -= take
            self._evict_tail(node, tier, copy.count - take)

    def coldest(self, tier: int, most: int) -> list[Node]:
        """Leaves that eviction would take next, in about its order; at most `most`. Takes nothing."""
        lru = self.leaf_lrus[tier]
        found: list[Node] = []
        looked: list[tuple[int, int, Node]] = []
        while lru.heap and len(found) < most and len(looked) < 4 * most:
            entry = heappop(lru.heap)
            if not entry[2].alive:
                lru.stale -= 1
                continue
            looked.append(entry)
            copy = self.copy_in(entry[2], tier)
            if copy.count and not copy.holds and not copy.backed_children:
                found.append(entry[2])
        for entry in looked:
            heappush(lru.heap, entry)
        return found

    def _evict_tail(self, node: Node, tier: int, keep: int) -> None:
        """Take the closed pages from `keep` on out of a tier, and out of the tree where they are nowhere else."""
        other = node.device if tier else node.host
        elsewhere = other is not None and other.count > 0
        if not elsewhere and not (node.device.holds or (tier and node.children)):
            self.prune_below(node)
            if keep:
                self.truncate(node, keep)
            else:
                self.prune(node)
                return
        elif keep and not (tier and elsewhere):
            upper = self.split(node, keep)
            self._drop_closed(node, tier, 0)
            self._enqueue_if_leaf(upper, tier)
            return
        else:
            self.version += 1
            self._drop_closed(node, tier, keep)
        self._enqueue_if_leaf(node, tier)

    def _enqueue_if_leaf(self, node: Node, tier: int) -> None:
        copy = self.copy_in(node, tier)
        if copy.count and not copy.backed_children and not copy.holds:
            self.enqueue_leaf(node, copy, tier)

    # ---- pruning

    def sweep(self, node: Node) -> None:
        """Prune `node`, and then each ancestor, that nobody holds and that has nothing left."""
        at: Node | None = node
        while at is not None and at.parent is not None and self._bare(at):
            above = at.parent
            self.prune(at)
            at = above

    def sweep_evicted(self, node: Node) -> None:
        """`sweep` after pages of `node` were evicted: where nothing is left, something was."""
        at: Node | None = node
        while at is not None and at.parent is not None and self._bare(at):
            above = at.parent
            self.ghosts.remember(at, 0, self)
            self.prune(at)
            at = above

    def _has_something(self, node: Node) -> bool:
        return any(copy.count or any(copy.pages) for copy in (self.copy_in(node, t) for t in self.tiers))

    def _bare(self, node: Node) -> bool:
        if node.children:
            return False
        for t in self.tiers:
            copy = self.copy_in(node, t)
            if copy.holds or copy.count:
                return False
            if not self.closed and any(copy.pages):
                return False
        return True

    def prune(self, node: Node) -> None:
        """Take a node without children out of the tree, with whatever it still has."""
        parent = node.parent
        assert parent is not None and not node.children
        if self._has_something(node):
            self.ghosts.remember(node, 0, self)
        self._free_from(node, 0)
        del parent.children[bytes(node.edge[: self.page_bytes])]
        if parent.recent is node:
            parent.recent = next(reversed(parent.children.values()), None)
        node.parent = None
        for t in self.tiers:
            self.leave_queues(self.copy_in(node, t), t)
        self.nodes -= 1
        self.version += 1
        if parent.parent is None:
            if not parent.children:
                self.forget_if_empty(parent.root)
        elif len(parent.children) < 2:  # no branch point any more
            for (g, t), queue in self.queues.items():
                if self.copy_in(parent, t).pages[g]:
                    queue.add(parent, self.copy_in(parent, t))

    def leave_queues(self, copy: Copy, tier: int) -> None:
        if not copy.queued:
            return
        if copy.queued & _IN_LEAF_LRU:
            lru = self.leaf_lrus[tier]
            lru.stale += 1
            if lru.stale * 2 > len(lru.heap) + 64:
                lru.heap = [entry for entry in lru.heap if entry[2].alive]
                heapify(lru.heap)
                lru.stale = 0
        for g in self.sliding + self.slots:
            self.queues[g, tier].lost(copy)

    def prune_below(self, node: Node) -> None:
        """Prune every descendant of `node`, children before parents."""
        if not node.children:
            return
        below: list[Node] = []
        stack = list(node.children.values())
        while stack:
            at = stack.pop()
            below.append(at)
            stack.extend(at.children.values())
        for at in reversed(below):
            self.prune(at)

    def truncate(self, node: Node, keep: int) -> None:
        """Cut the pages from `keep` on, and all that belongs to them, off a leaf."""
        self.ghosts.remember(node, keep, self)
        self._free_from(node, keep)
        node.edge = node.edge[: keep * self.page_bytes]
        node.n = keep
        node.crc = None
        if node.hashes is not None:
            del node.hashes[32 * keep :]
        self.version += 1

    def _free_from(self, node: Node, keep: int) -> None:
        """Free what `node` has from its page `keep` on, in every group and tier."""
        for t in self.tiers:
            copy = self.copy_in(node, t)
            for g in self.sliding:
                if copy.pages[g] is not None:
                    self.drop_sliding(node, t, g, range(keep, node.n))
                    copy.pages[g] = copy.pages[g][: 4 * keep] if keep else None
                reads = copy.reads[g]
                if reads is not None:
                    del reads[keep:]
            for g in self.slots:
                for depth in [depth for depth in copy.pages[g] or () if depth > node.start + keep]:
                    drop_slot(self, node, t, g, depth)
                    self.count_evicted(node, t, g, 1)
            self._drop_closed(node, t, keep)

    def drop_sliding(self, node: Node, tier: int, g: int, columns: range | Ids) -> int:
        """Free pages of a group that is not closed; they become holes. Nobody may read them. Returns how many."""
        held = self.copy_in(node, tier).pages[g]
        if not held:
            return 0
        pages = np.frombuffer(held, np.int32)
        at = np.asarray(columns, np.int64)
        at = at[at < len(pages)]
        at = at[pages[at] != 0]
        if not len(at):
            return 0
        if self.announcing and g == self.announced_group:
            tell_removed(self, node, tier, at)
        pool = self.pools[tier][g]
        ids = pages[at]
        pages[at] = 0
        pool.release(ids, TREE)
        pool.idle -= len(ids)
        self.count_evicted(node, tier, g, len(ids))
        self.version += 1
        return len(ids)

    def count_evicted(self, node: Node, tier: int, g: int, pages: int) -> None:
        self.evicted[tier][g] += pages
        node.root.tally["evicted_pages"] += pages

    def requeue(self, node: Node, tier: int, g: int, low: int, high: int) -> None:
        """Pages of a group in columns [low, high) of the path to `node` may have lost their last reader."""
        queue = self.queues[g, tier]
        standing = queue.bits[0]
        while True:
            if node.start < high:
                copy: Copy = node.host if tier else node.device  # type: ignore[assignment]
                if not copy.queued & standing and copy.pages[g]:
                    queue.add(node, copy)
            if node.start <= low:
                break
            node = node.parent  # type: ignore[assignment]
