"""The prefix tree: its shape, its pins, and when a node goes.

What a node has of a group is the business of that group's shape: closed.py, sliding.py, snapshots.py. The tree knows
nothing of requests. Never recursive: a chain of a million nodes is an ordinary tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from .closed import ClosedPages
from .events import KVEvent
from .eviction import EvictionOrder, UseClock
from .families import Family, family_class
from .ghosts import Ghosts
from .group import DEVICE, CacheGroup
from .hashes import DIGEST_BYTES
from .namespace import Namespace
from .node import Copy, Node
from .page_ids import Ids, Ranges
from .path import Path, agree
from .roots import Root
from .sliding import SlidingPages
from .snapshots import Snapshots
from .tier import Tier

if TYPE_CHECKING:
    from .transfer import Transfer

_NO_PAGE = 1 << 60
Cover = list[tuple[Node, int, int]]  # nodes of a path, deepest first, and which of their own pages are meant


class GroupShape(Protocol):
    """How a kind of memory stands in the tree. Groups of one shape that come and go together share an object."""

    def split(self, upper: Node, lower: Node, tier: int) -> None:
        """A node has been cut: `upper` takes what stands in it. `lower.copies[tier]` still has all of it."""

    def land(self, transfer: Transfer, g: int) -> Ranges:
        """Take what a transfer brings of group `g` (of all closed groups at once), or free it where the tier has that
        already. Returns the columns that took theirs."""

    def free_from(self, node: Node, tier: int, keep: int) -> None:
        """Free what `node` has in a tier behind its page `keep`. Nothing may read it."""

    def ids(self, copy: Copy, g: int) -> Ids:
        """The pages or slots of group `g` in a copy."""

    def columns(self, node: Node, tier: int, g: int) -> Ids:
        """Which pages of `node`, counted from its start, are in a tier; of a snapshot, the one it stands behind."""


class Tree:
    def __init__(
        self, page_size: int, groups: tuple[CacheGroup, ...], hashing: bool, announcing: bool, ghost_bytes: int
    ) -> None:
        self.page_size = page_size
        self.page_bytes = 4 * page_size
        self.groups = groups
        self.names = [group.name for group in groups]
        self.families: list[Family] = [family_class(g.family)(g, i, page_size) for i, g in enumerate(groups)]
        fams = self.families
        self.closed = [i for i, f in enumerate(fams) if f.closed]
        self.sliding = [i for i, f in enumerate(fams) if not f.closed and f.shape == "pages"]
        self.paged = self.closed + self.sliding
        self.waits_for_real = [i for i in self.closed if not fams[i].reads_promised]
        self.slots = [i for i, f in enumerate(fams) if f.shape == "slot"]
        self.closed_pages = ClosedPages(self)
        self.sliding_pages = {g: SlidingPages(self, g) for g in self.sliding}
        self.snapshots = Snapshots(self)
        self.shape_of: list[GroupShape] = [
            self.closed_pages if f.closed else self.snapshots if f.shape == "slot" else self.sliding_pages[i]
            for i, f in enumerate(fams)
        ]
        self.shapes = list(dict.fromkeys(reversed(self.shape_of)))  # what stands alone goes before closed pages
        self._no_pages: list[Any] = [b"" if f.closed else None for f in fams]
        self._no_reads: list[bytearray | None] = [None] * len(fams)
        self.has_host = any(g.host_pages for g in groups)
        self.announced_group = self.closed[0] if self.closed else 0  # the group of which events speak
        self.tiers = [Tier(self, index) for index in range(1 + self.has_host)]
        self.device = self.tiers[DEVICE]
        self.hashing = hashing or announcing
        self.announcing = announcing
        self.events: list[KVEvent] = []
        self.roots: dict[Namespace, Root] = {}
        self.detached_roots: dict[Root, None] = {}  # evicted namespaces of which pages are still held
        self.ghosts = Ghosts(ghost_bytes)
        self.clock = UseClock()
        self.seq = 0
        self.version = 0  # changes whenever a path found earlier may no longer stand
        self.nodes = 0
        self.promises = 0  # made by steps in flight
        self.uncounted: dict[Any, None] = {}  # readers of windows that are not counted yet, see readers.py

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
        copies = tuple([Copy(self._no_pages.copy(), self.clock.now, self._no_reads.copy()) for _ in self.tiers])
        return Node(root, parent, edge, start, n, self.seq, copies)

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
        so leases that are anchored at its end still are. Emits nothing, and keeps every hash."""
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
            upper.hashes, node.hashes = node.hashes[: DIGEST_BYTES * k], node.hashes[DIGEST_BYTES * k :]
        for tier, (top, low) in enumerate(zip(upper.copies, node.copies, strict=True)):
            top.used, top.holds = low.used, 1 if low.holds else 0
            for shape in self.shapes:
                shape.split(upper, node, tier)
        self.nodes += 1
        self.version += 1
        if not self.closed and self._bare(node):
            self.prune(node)  # tokens behind the last snapshot, of which nothing is left
        return upper

    def attach(self, parent: Node, edge: bytes | bytearray, n: int) -> Node:
        """A new child of `parent`, with nothing in it yet."""
        node = self._node(parent.root, parent, edge, parent.start + parent.n, n)
        parent.children[bytes(edge[: self.page_bytes])] = node
        parent.recent = node
        self.nodes += 1
        for sliding in self.sliding_pages.values():  # the parent is no leaf now: its last window may lie between others
            for tier in range(len(self.tiers)):
                sliding.enqueue(parent, tier)
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
            assert node.parent is not None
            node = node.parent
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
            assert node.parent is not None
            node = node.parent
            start = node.start

    @staticmethod
    def shared(one: Node, other: Node) -> int:
        """How many pages the paths to two nodes have in common."""
        while one is not other:
            if one.end < other.end:
                one, other = other, one
            assert one.parent is not None
            one = one.parent
        return one.end

    def first_promised(self, node: Node) -> int:
        """The first page on the path to `node` that closed groups have only promised, by a step in flight: whatever
        stands behind it goes with it if the step fails. Beyond any page if there is none."""
        first = _NO_PAGE
        at: Node | None = node if self.promises else None
        while at is not None:
            for promise in at.promised or ():
                if promise.first < promise.last and promise.first < first:
                    first = promise.first
            at = at.parent
        return first

    # ---- pins

    def pin(self, node: Node, tier: int) -> None:
        """Hold the path to `node`. Climbs only to the first ancestor that is held already."""
        taken = 0
        at: Node | None = node
        while at is not None:
            copy = at.copies[tier]
            copy.holds += 1
            if copy.holds > 1:
                break
            taken += copy.count
            at = at.parent
        self.tiers[tier].leaves.evictable -= taken

    def unpin(self, node: Node, tier: int) -> None:
        """Let go of the path to `node`. What nothing holds any more was used just now."""
        now, freed = self.clock.now, 0
        at: Node | None = node
        while at is not None:
            copy = at.copies[tier]
            copy.holds -= 1
            if copy.holds:
                break
            copy.used = EvictionOrder.rank(now, copy.used)
            freed += copy.count
            if not copy.backed_children and copy.count:
                self.tiers[tier].leaves.add(at, copy)
            at = at.parent
        self.tiers[tier].leaves.evictable += freed
        if at is not node and not node.children:
            if type(node.edge) is bytearray and not node.copies[DEVICE].holds:
                node.edge = bytes(node.edge)
                self.closed_pages.rest(node)
            if not node.copies[DEVICE].count:
                self.sweep(node)

    # ---- pruning

    def sweep(self, node: Node) -> None:
        """Prune `node`, and then each ancestor, that nothing holds and that has nothing left."""
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

    def _bare(self, node: Node) -> bool:
        """Whether nothing is left of `node`. Where there are closed pages, nothing else is worth keeping it for."""
        if node.children:
            return False
        for copy in node.copies:
            if copy.holds or copy.count:
                return False
            if not self.closed and any(copy.pages):
                return False
        return True

    def prune(self, node: Node) -> None:
        """Take a node without children out of the tree, with all that it still has."""
        parent = node.parent
        assert parent is not None and not node.children
        if any([any(copy.pages) for copy in node.copies]):  # noqa: C419  (a list: it is asked of every leaf that goes)
            self.ghosts.remember(node, 0, self)
        self._free_from(node, 0)
        del parent.children[bytes(node.edge[: self.page_bytes])]
        if parent.recent is node:
            parent.recent = next(reversed(parent.children.values()), None)
        node.parent = None
        self.leave_queues(node)
        self.nodes -= 1
        self.version += 1
        if parent.parent is None:
            if not parent.children:
                self.forget_if_empty(parent.root)
        elif len(parent.children) < 2:  # no branch point any more
            for tier, copy in zip(self.tiers, parent.copies, strict=True):
                for g, queue in tier.queues.items():
                    if copy.pages[g]:
                        queue.add(parent, copy)

    def leave_queues(self, node: Node) -> None:
        """`node` has left the tree."""
        for tier, copy in zip(self.tiers, node.copies, strict=True):
            if copy.queued:
                tier.leaves.lost(copy)
                for queue in tier.queues.values():
                    queue.lost(copy)

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
            del node.hashes[DIGEST_BYTES * keep :]
        self.version += 1

    def _free_from(self, node: Node, keep: int) -> None:
        """Free what `node` has from its page `keep` on, in every group and tier."""
        for tier in range(len(self.tiers)):
            for shape in self.shapes:
                shape.free_from(node, tier, keep)

    def count_evicted(self, node: Node, tier: int, g: int, pages: int) -> None:
        self.tiers[tier].evicted[g] += pages
        node.root.tally["evicted_pages"] += pages

    def enqueue_path(self, node: Node, tier: int, g: int, low: int, high: int) -> None:
        """Pages of group `g` in columns [low, high) of the path to `node` may have lost their last reader."""
        queue = self.tiers[tier].queues[g]
        at: Node | None = node
        while at is not None:
            if at.start < high and at.copies[tier].pages[g]:
                queue.add(at, at.copies[tier])
            if at.start <= low:
                break
            at = at.parent
