"""What a live request holds, and the frozen things handed to the caller. Opaque outside cache/.

The pages of one group along a lease's path, by column:

    0 ......... low ............ upto ................. end of the table
    | holes     | the tree's, read | private: written by |
    | (slid by) | by this lease    | this lease alone    |

`own` holds the exceptions: columns below `upto` where the lease still has a duplicate of the tree's page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from .group import DEVICE
from .namespace import Namespace
from .page_ids import HOLE, Ids, PageIds, Ranges, one, present, runs_of
from .path import Path
from .readers import read, unread

if TYPE_CHECKING:
    from .match import Explanation
    from .node import Node, Root
    from .transfer import Transfer
    from .tree import Tree

_NOTHING: Mapping[int, list[tuple[int, int]]] = {}
_ALONE: Mapping[Transfer, int] = {}
_NO_SPANS: dict[tuple[int, int], Ranges] = {}
_NEVER = 1 << 62  # while it is loading


class Binding:
    """A request's tie to a namespace as it was when the request came. Frozen; ends with `unbind`."""

    __slots__ = ("_root", "cache", "found", "live", "prompt", "reached")

    def __init__(self, root: Root, cache: object) -> None:
        self._root = root
        self.cache = cache
        self.live = True
        self.prompt = 0  # tokens of its prompt, once it is in the statistics
        self.found: Explanation | None = None  # by the admission that the statistics count
        self.reached = 0  # the furthest position it is known to have computed: nothing before it can be a hit any more

    @property
    def namespace(self) -> Namespace:
        return self._root.namespace

    @property
    def attached(self) -> bool:
        """Whether what this request computes can still be found by others."""
        return self._root.attached


class Span(NamedTuple):
    """A frozen handle on pages [first, last) of a path that became real; what `begin_save` takes."""

    first: int
    last: int
    node: Node


class PageCopy(NamedTuple):
    """Copy the first `tokens` tokens of a page (or a whole state slot) before or after the batch."""

    group: str
    source: int
    target: int
    tokens: int
    when: Literal["before", "after"]


class Sibling(NamedTuple):
    """A real page that agrees with the prompt in its first tokens: the source of a copy on write."""

    node: Node
    column: int
    tokens: int


class Match(NamedTuple):
    """What the cache could serve a prompt. Pins nothing; `admit` looks again if the tree has changed since, and then
    `lease.start` may be another than `start`."""

    boundary: int  # pages every group can serve
    start: int  # the first token to compute
    cached: int  # prompt tokens that need not be computed
    depth: int  # pages closed groups have, often more
    cuts: tuple[int, ...]  # page ends at which to cut a chunk and checkpoint
    pending: int  # a deeper boundary that another request has promised a snapshot for, or 0
    length: int
    reason: str  # why it is not more (DESIGN 4.14), cheaply found
    binding: Binding
    tokens: bytes
    path: Path
    sibling: Sibling | None
    version: int

    @property
    def load(self) -> bool:
        """Whether some of it must come from host."""
        path = self.path
        if path.tier == DEVICE or (path.tree.closed and path.device_closed(path.depth) < self.boundary):
            return path.tier != DEVICE
        near = Path(path.tree, path.root, path.nodes, path.depth)
        near.tier = DEVICE
        families = path.tree.families
        return any(family.deepest(near, self.boundary, self.length) < self.boundary for family in families)


class Lease:
    """What a live request holds: its root, the path it reads, the private pages it writes."""

    __slots__ = (
        "begun",
        "binding",
        "boundary",
        "copied",
        "copied_at",
        "counted",
        "cuts",
        "deps",
        "depth",
        "detached",
        "ended",
        "length",
        "low",
        "node",
        "opened",
        "opened_at",
        "own",
        "prompt_end",
        "reason",
        "rolling",
        "root",
        "seed_depth",
        "served",
        "shared",
        "source",
        "start",
        "start_snapshot",
        "tables",
        "tokens",
        "uncopied",
        "unsaved",
        "upto",
        "waits",
        "wanted",
        "working",
        "writes",
    )

    def __init__(self, binding: Binding, node: Node, depth: int, groups: int) -> None:
        self.binding = binding
        self.root: Root = binding._root
        self.node = node  # the anchor: the node that ends the path this lease follows
        self.depth = depth
        self.tables = [bytearray()] if groups == 1 else [bytearray() for _ in range(groups)]
        self.upto = [0] * groups
        self.low = [0] * groups
        self.own: dict[tuple[int, int], int] = {}
        self.deps: list[tuple[int, int]] = []  # (step, first page that only this step makes real)
        self.waits: list[Transfer] = []
        self.wanted: Mapping[int, list[tuple[int, int]]] = _NOTHING  # while loading: columns to read once they are here
        self.shared: Mapping[Transfer, int] = _ALONE  # detached: pages that its path shares with each load's
        self.boundary = 0  # pages it began with
        self.start_snapshot: dict[int, int] = {}  # slot group -> snapshot to start from, read until it has been copied
        self.seed_depth = 0  # and where that stands
        self.working: dict[int, int] = {}  # slot group -> the slot its rows advance
        self.source: PinHolder | None = None  # the page a copy on write takes from
        self.copied = 0  # tokens that copy brings
        self.copied_at = 0  # the step that makes it
        self.uncopied = False  # that step failed
        self.opened = False  # its first batch has been planned
        self.opened_at = 0  # the step that copies the snapshot it starts from
        self.cuts: tuple[int, ...] = ()
        self.tokens = b""  # the prompt, while others may wait for the snapshots it will make
        self.length = 0
        self.prompt_end = 0  # the last page end of its prompt, until the tree knows it
        self.start = 0
        self.rolling = 0  # page end of the checkpoint that the next one replaces
        self.unsaved: list[Any] | None = None  # first, last, node: made real, and not offered for saving
        self.reason = ""  # why it was not served more, if it has been counted
        self.begun = _NEVER  # where it began, or last went on, without having computed what is before
        self.served = 0  # what that counts in `cached_tokens`, until a step from there on is done
        self.writes = True
        self.counted = True  # as a reader of windows; else it is one of `Tree.uncounted`
        self.detached = False
        self.ended = False

    def table(self, g: int) -> Ids:
        """The pages of group `g` by column; for a family of slots, the working slot."""
        return np.frombuffer(bytes(self.tables[g]), np.int32)

    def reach(self, groups: list[int]) -> int:
        """How many columns have a page, or had one, in each of these groups."""
        least = 1 << 40
        for g in groups:
            if len(self.tables[g]) < least:
                least = len(self.tables[g])
        return least // 4

    @property
    def loading(self) -> bool:
        return bool(self.waits)

    def depends(self, step: int, page: int, oldest: int) -> None:
        """Note that pages from `page` on are real only once `step` is done; forget what has been done."""
        if self.deps and self.deps[0][0] < oldest:
            self.deps = [dep for dep in self.deps if dep[0] >= oldest]
        self.deps.append((step, page))

    def detach(self, tree: Tree) -> None:
        """The tree is leaving: from now on the lease reads its closed pages by page."""
        if self.waits:  # what is on the device so far; the rest will come to it privately
            there = [node for node in tree.path_to(self.node).nodes if node.copies[DEVICE].count]
            for g in tree.closed:
                self.tables[g] = bytearray().join([node.copies[DEVICE].pages[g] for node in there])
                self.upto[g] = len(self.tables[g]) // 4
            self.shared = {transfer: tree.shared(self.node, transfer.node) for transfer in self.waits}
        for g in tree.closed:
            tree.device.pools[g].read_unhooked(self.adopted(g)[1].tobytes())
        for g, column in self.own:  # of the tree's page beside its own it reads nothing
            if g in tree.sliding:
                unread(tree, self.node, DEVICE, g, column, column + 1)
        self.detached = True

    def count_reads(self, tree: Tree) -> None:
        """Become a counted reader of what it reads of groups that are not closed."""
        self.counted = True
        for g in tree.sliding:
            for low, high in self.reading(g):
                read(tree, self.node, DEVICE, g, low, high)

    def seeds(self) -> dict[tuple[int, int], bytes]:
        """The snapshots it is to start from, as a `PinHolder` has them."""
        return {(DEVICE, g): one(slot) for g, slot in self.start_snapshot.items()}

    def reading(self, g: int) -> Ranges:
        """The columns of a group that is not closed where this lease is a reader: wherever its table has a page that
        it has handed to the tree or taken from there, or a duplicate of that."""
        raw = self.tables[g][: 4 * self.upto[g]]
        end = len(raw) // 4
        low = end + -len(raw.lstrip(HOLE)) // 4
        if HOLE not in raw[4 * low :]:  # as most windows are: holes, then none
            return [(low, end)] if low < end else []
        return runs_of(np.frombuffer(raw, np.int32))

    def adopted(self, g: int) -> tuple[Ids, Ids]:
        """Columns and ids of the tree's pages in this lease's table."""
        raw = self.tables[g][: 4 * self.upto[g]]
        end = len(raw) // 4
        low = end + -len(raw.lstrip(HOLE)) // 4
        if not self.own and HOLE not in raw[4 * low :]:  # as most windows are: holes, then none
            return np.arange(low, end, dtype=np.int32), np.frombuffer(raw[4 * low :], np.int32)
        ids = np.frombuffer(raw, np.int32)
        there = ids != 0
        if self.own:
            for group, column in self.own:
                if group == g:
                    there[column] = False
        columns = there.nonzero()[0].astype(np.int32)
        return columns, ids[columns]

    def private(self, g: int, first: int = 0) -> PageIds:
        """Ids of the pages of a paged group that this lease alone has, in columns from `first` on."""
        ids = present(self.tables[g][4 * max(self.upto[g], first) :])
        if not self.own:
            return ids
        own = [one(page) for (group, column), page in self.own.items() if group == g and column >= first]
        return b"".join([ids, *own])


class PinHolder:
    """A pin that is not a lease: on a path in some tiers, and on pages of its columns [low, high), until let go.
    Made by `hold`, or right here for what somebody reads already and hands over."""

    __slots__ = ("columns", "counted", "detached", "node", "pages", "root", "spans", "tiers")

    def __init__(
        self,
        tree: Tree,
        node: Node,
        tiers: tuple[int, ...],
        columns: tuple[int, int],
        pages: dict[tuple[int, int], bytes],
        spans: dict[tuple[int, int], Ranges] = _NO_SPANS,
    ) -> None:
        self.root = node.root
        self.node = node
        self.tiers = tiers
        self.columns = columns
        self.pages = pages  # (tier, group) -> ids, as bytes
        self.spans = spans  # (tier, group that is not closed) -> where they stand
        self.counted = True  # as a reader of them; else it is one of `Tree.uncounted`
        self.detached = False
        for tier in tiers:
            tree.pin(node, tier)
            if not tier:
                node.held += 1
        self.root.holders[self] = None

    def detach(self, tree: Tree) -> None:
        """The tree is leaving: from now on this reads by page what is there now. Some may have been withdrawn."""
        for tier in self.tiers:
            for g in tree.closed:
                ids = self.pages[tier, g] = _pages_in(tree, self.node, tier, g, [self.columns])
                tree.tiers[tier].pools[g].read_unhooked(ids)
        for (tier, g), where in self.spans.items():
            self.pages[tier, g] = _pages_in(tree, self.node, tier, g, where)
        self.detached = True

    def count_reads(self, tree: Tree) -> None:
        """Become a counted reader of what it reads of groups that are not closed."""
        self.counted = True
        for (tier, g), where in self.spans.items():
            for low, high in where:
                read(tree, self.node, tier, g, low, high)

    def let_go(self, tree: Tree) -> None:
        del self.root.holders[self]
        if self.detached:
            for (tier, g), ids in self.pages.items():
                tree.tiers[tier].pools[g].unread_unhooked(ids)
            tree.forget_if_empty(self.root)
            return
        if self.counted:
            for (tier, g), where in self.spans.items():
                for low, high in where:
                    unread(tree, self.node, tier, g, low, high)
        else:
            del tree.uncounted[self]
        if tree.slots:
            for (tier, g), ids in self.pages.items():
                if g in tree.slots:
                    pool, idle = tree.tiers[tier].pools[g], False
                    for slot in memoryview(ids).cast("i"):
                        if pool.unread(slot):
                            idle = True
                    if idle:
                        tree.enqueue_path(self.node, tier, g, *self.columns)
        for tier in self.tiers:
            if not tier:
                self.node.held -= 1
            tree.unpin(self.node, tier)
        if not self.root.bound:
            tree.forget_if_empty(self.root)


def hold(
    tree: Tree,
    node: Node,
    tiers: tuple[int, ...],
    columns: tuple[int, int],
    pages: dict[tuple[int, int], bytes],
    spans: dict[tuple[int, int], Ranges],
) -> PinHolder:
    """Pin the path to `node`, and read `pages`, which lie in its columns [low, high); those of groups that are not
    closed at `spans`."""
    read_held(tree, node, pages, spans)
    return PinHolder(tree, node, tiers, columns, pages, spans)


def read_held(
    tree: Tree, node: Node, pages: dict[tuple[int, int], bytes], spans: dict[tuple[int, int], Ranges]
) -> None:
    """Become a reader of what a `PinHolder` of these is going to hold. Closed pages need none: the path is pinned."""
    for (tier, g), where in spans.items():
        for low, high in where:
            read(tree, node, tier, g, low, high)
    if tree.slots:
        for (tier, g), ids in pages.items():
            if g in tree.slots:
                for slot in memoryview(ids).cast("i"):
                    tree.tiers[tier].pools[g].read(slot)


def _pages_in(tree: Tree, node: Node, tier: int, g: int, where: Ranges) -> bytes:
    """The pages that a group has in these columns of the path to `node`."""
    parts = [
        present(pages[4 * first : 4 * last])
        for low, high in where
        for at, first, last in tree.cover(node, low, high)
        if (pages := at.copies[tier].pages[g])
    ]
    return b"".join(parts)
