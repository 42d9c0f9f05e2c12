"""Steps in flight: what each has promised, and what must not change until its event comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .events import announce_removed
from .group import DEVICE, HOST
from .lease import Lease, PinHolder
from .node import Node
from .page_ids import PageIds, Ranges, as_ids, runs_of
from .pool import FLIGHT, TREE
from .readers import unread_columns

if TYPE_CHECKING:
    from .tree import Tree


class Fill(NamedTuple):
    """Holes of a group that is not closed, filled by a lease: where on its path, root side first, and the pages."""

    g: int
    where: Ranges
    ids: bytes


class Promise:
    """Pages published before they were computed: [first, last) of closed groups, and holes filled by others."""

    __slots__ = ("duplicates", "fills", "first", "last", "lease", "low", "node", "step")

    def __init__(
        self,
        step: int,
        lease: Lease,
        node: Node,
        first: int,
        last: int,
        fills: list[Fill],
        duplicates: list[tuple[int, int]],
    ) -> None:
        self.step = step
        self.lease = lease
        self.node = node
        self.first = first
        self.last = last
        self.fills = fills
        self.duplicates = duplicates
        self.low = first  # the first page that is promised here in any group
        if fills:
            self.low = min(first, *(fill.where[0][0] for fill in fills))

    def ranges(self, g: int, closed: bool) -> Ranges:
        """Which pages of group `g` it promises."""
        if closed:
            return [(self.first, self.last)]
        return [run for fill in self.fills if fill.g == g for run in fill.where]

    def covers(self, g: int, column: int, closed: bool) -> bool:
        return any(low <= column < high for low, high in self.ranges(g, closed))


class Snapshot(NamedTuple):
    """A checkpoint on its way: the working slots will have been copied here when the step is done."""

    lease: Lease
    page: int
    slots: dict[int, int]
    rolling: bool


class StepInFlight:
    """One step between its plan and its event."""

    __slots__ = ("ended", "freed", "holders", "opened", "promises", "snapshots", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.promises: list[Promise] = []
        self.snapshots: list[Snapshot] = []
        self.opened: list[Lease] = []  # requests that start from a snapshot, which it copies
        self.ended: list[Lease] = []  # requests that are over, but whose rows still run
        self.holders: list[PinHolder] = []  # of what its copies and rows read, perhaps without their leases
        self.freed: list[tuple[int, PageIds]] = []  # (group, ids) given out only after that


def mark(tree: Tree, promise: Promise) -> None:
    """Note a promise at the nodes that have its pages."""
    node = promise.node
    if promise.low >= node.start and node.promised is None:
        node.promised = [promise]
        return
    for at, _, _ in tree.cover(node, promise.low, promise.last):
        at.promised = [*(at.promised or ()), promise]


def unmark(tree: Tree, promise: Promise) -> None:
    node = promise.node
    promised = node.promised
    if promise.low >= node.start and promised is not None and len(promised) == 1 and promised[0] is promise:
        node.promised = None
        return
    for at, _, _ in tree.cover(node, promise.low, promise.last):
        if at.promised is not None:
            at.promised = [other for other in at.promised if other is not promise] or None


def note_promises(tree: Tree, lease: Lease) -> None:
    """Note which steps must succeed for the pages on a lease's path to be real."""
    if not tree.promises:
        return
    at: Node | None = lease.node
    while at is not None:
        if at.promised:
            lease.deps += [(promise.step, promise.low) for promise in at.promised]
        at = at.parent


def withdraw(tree: Tree, promise: Promise, freed: list[tuple[int, PageIds]]) -> None:
    """Take back what was promised. The pages go to `freed`, in flight: a later step may still write them."""
    for fill in promise.fills:
        pool = tree.device.pools[fill.g]
        taken = []
        filled = as_ids(fill.ids)
        done = 0
        for begin, end in fill.where:
            ours = filled[done : done + end - begin]
            done += end - begin
            for node, low, high in tree.cover(promise.node, begin, end):
                pages = node.copies[DEVICE].pages[fill.g]
                if pages is None:
                    continue
                view = np.frombuffer(pages, np.int32)[low:high]
                ids = ours[node.start + low - begin : node.start + low - begin + len(view)]
                same = view == ids
                view[same] = 0
                taken.append(ids[same].tobytes())
                for first, last in runs_of(same):
                    pool.idle -= unread_columns(node.copies[DEVICE], fill.g, low + first, low + last)
        withdrawn = b"".join(taken)
        pool.move(withdrawn, TREE, FLIGHT)
        freed.append((fill.g, withdrawn))
    if promise.first < promise.last and tree.closed:
        for node, low, high in tree.cover(promise.node, promise.first, promise.last):
            if not node.copies[DEVICE].count:
                continue
            if low:
                tree.split(node, low)
                high -= low
            assert high == node.n, "something real stands below something promised"
            _lose_below(tree, node, freed)
            _lose_device(tree, node, freed)
    tree.version += 1


def _lose_below(tree: Tree, node: Node, freed: list[tuple[int, PageIds]]) -> None:
    """Nothing stays on the device below pages that are withdrawn: what a lease computed itself, and had published there
    because it saw another lease's promise of the same pages, goes with them."""
    below = []
    stack = [child for child in node.children.values() if child.copies[DEVICE].count]
    while stack:
        at = stack.pop()
        below.append(at)
        stack += [child for child in at.children.values() if child.copies[DEVICE].count]
    for at in reversed(below):
        if tree.announcing and tree.announced_group in tree.closed:
            announce_removed(tree, at, DEVICE, range(at.n))
        _lose_device(tree, at, freed)
        tree.sweep(at)


def _lose_device(tree: Tree, node: Node, freed: list[tuple[int, PageIds]]) -> None:
    """What host has of a node stays there: if that is its first pages alone, in a node of their own."""
    upper = None
    if tree.has_host and 0 < node.copies[HOST].count < node.n:
        upper = tree.split(node, node.copies[HOST].count)
    copy = node.copies[DEVICE]
    for g in tree.closed:
        ids = copy.pages[g]
        tree.device.pools[g].move(ids, TREE, FLIGHT)
        freed.append((g, ids))
        copy.pages[g] = b""
    tree.closed_pages.shrunk(node, DEVICE, 0)
    if upper is not None:
        _lose_device(tree, upper, freed)
