"""Host pins: what was fetched for a request stays on host until the request is admitted. A waiting request
holds no other memory.

A host pin holds the path to a boundary, and the windows and the snapshot with which a request would begin there. It
never touches the device. All host pins together are limited, so that the rest of host can be evicted as ever; a pin
ends when its owner says so, or at once with its namespace: nothing could find the pages any more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .group import HOST
from .lease import Binding, PinHolder, hold
from .match import Matcher
from .page_ids import Ids, as_ids, part
from .path import Path
from .roots import Root
from .transfer import PendingTransfers, host_runs
from .tree import Tree

# Host pins hold at most one page in so many of each group. With half of it, waiting requests keep what is worth most,
# and there still is room for saves of running requests and for further fetches.
_SHARE = 2


class PinnedOnHost(NamedTuple):
    """The number of a host pin, or 0 if nothing is held; and whether the limit allows less than host has of it."""

    pin: int
    short: bool


_NOTHING = PinnedOnHost(0, False)


class HostPins:
    def __init__(self, tree: Tree, matcher: Matcher, transfers: PendingTransfers) -> None:
        self.tree = tree
        self.transfers = transfers
        self.matcher = matcher
        self.live: dict[int, PinHolder] = {}
        self.held = [0] * len(tree.groups)  # different host pages that are held
        self.limits = [group.host_pages // _SHARE for group in tree.groups]
        self._times = [np.zeros(0, np.int32) for _ in tree.groups]  # by host page: how many pins hold it
        self._last = 0

    def begin(self, binding: Binding, tokens: bytes, upto: int) -> PinnedOnHost:
        """Hold what host has of the first `upto` pages of a prompt, as far as every group could begin with it."""
        tree, root = self.tree, binding._root
        if not root.attached or not tree.has_host:
            return _NOTHING
        path = tree.walk(root, tokens[: upto * tree.page_bytes])
        length = len(tokens) // 4
        boundary, _ = self.matcher.boundary(path, length)
        # A node that is on the device alone may have to go, and takes with it what is below: nothing is held there.
        if not boundary or (tree.closed and tree.closed_pages.whole(path.nodes[-1], HOST) < boundary):
            return _NOTHING
        pages = self._pages(path, boundary, length)
        room = self._room(pages)
        short = room < boundary
        if short:
            if not room or len(tree.closed) < len(tree.groups):  # others could not begin at an earlier page
                return PinnedOnHost(0, True)
            boundary = room
            pages = {g: ids[:room] for g, ids in pages.items()}
        if not pages:
            return _NOTHING
        node = tree.node_ending(path.nodes[-1], boundary)
        self._count(pages, 1)
        self._last += 1
        self.transfers.counts["stays"] += 1
        held = {(HOST, g): ids.tobytes() for g, ids in pages.items()}
        spans = {
            (HOST, g): host_runs(tree, node, g, tree.families[g].columns(boundary, length))
            for g in tree.sliding
            if g in pages
        }
        self.live[self._last] = hold(tree, node, (HOST,), (0, boundary), held, spans)
        return PinnedOnHost(self._last, short)

    def end(self, pin: int) -> None:
        """Let go of it. One that is over already, with its namespace, may be ended again."""
        holder = self.live.pop(pin, None)
        if holder is not None:
            self._count({g: as_ids(ids) for (_, g), ids in holder.pages.items()}, -1)
            holder.let_go(self.tree)

    def leave(self, root: Root) -> None:
        """A namespace goes."""
        for pin in [pin for pin, holder in self.live.items() if holder.root is root]:
            self.end(pin)

    def _pages(self, path: Path, boundary: int, length: int) -> dict[int, Ids]:
        """By group: the host pages with which a prompt would begin at `boundary`."""
        tree = self.tree
        found: dict[int, Ids] = {}
        for g in tree.closed:
            held = b"".join([bytes(node.copies[HOST].pages[g]) for node in path.nodes])
            found[g] = as_ids(part(held, 0, boundary))
        for g in tree.sliding:
            parts = [
                as_ids(part(pages, low, high))
                for first, end in tree.families[g].columns(boundary, length)
                for at, low, high in tree.cover(path.nodes[-1], first, end)
                if (pages := at.copies[HOST].pages[g])
            ]
            ids = np.concatenate(parts) if parts else np.zeros(0, np.int32)
            found[g] = ids[ids != 0]
        for g in tree.slots:
            slot = (path.holding(boundary).copies[HOST].pages[g] or {}).get(boundary)
            found[g] = np.array([slot] if slot else [], np.int32)
        return {g: ids for g, ids in found.items() if len(ids)}

    def _room(self, pages: dict[int, Ids]) -> int:
        """How many of these pages, in every group from the first on, the limit allows. All: a great number."""
        most = 1 << 60
        for g, ids in pages.items():
            if not len(self._times[g]):
                self._times[g] = np.zeros(self.tree.groups[g].host_pages + 1, np.int32)
            new = np.cumsum(self._times[g][ids] == 0)
            room = self.limits[g] - self.held[g]
            if new[-1] > room:
                most = min(most, int(np.searchsorted(new, room, "right")))
        return most

    def _count(self, pages: dict[int, Ids], more: int) -> None:
        for g, ids in pages.items():
            times = self._times[g]
            before = np.count_nonzero(times[ids])
            times[ids] += more
            self.held[g] += int(np.count_nonzero(times[ids])) - int(before)
