"""Saves: which real pages host does not have, room for them there, and what is visible once they have arrived.

Most saves are short: a few nodes, some pages of each. So pages are gathered and landed as runs (a column and the bytes
of its ids), node by node, and owners and readers change once a group. numpy looks at a node only where something in it
is in the way: a hole, a page host has already, a promise, another save under way.
"""

from __future__ import annotations

import numpy as np

from .group import DEVICE, HOST
from .lease import Holder, Span, hold
from .node import Node
from .pool import FLIGHT, Ids
from .room import Room
from .runs import HOLE, Ranges, Run, joined, ranges, runs, spread
from .transfer import Ledger, Operation, Parts, Transfer
from .tree import Cover, Tree, as_ids


class Saves:
    def __init__(self, tree: Tree, room: Room, ledger: Ledger) -> None:
        self.tree = tree
        self.room = room
        self.ledger = ledger
        host = [bool(group.host_pages) for group in tree.groups]
        whole = all(host[g] for g in tree.closed)  # closed groups are on host together or not at all
        self.savable = [g for g, there in enumerate(host) if there and (whole or g not in tree.closed)]

    def begin_save(self, span: Span) -> Operation | None:
        """Start to copy to host what of `span` is not there and not on its way. None: nothing to do, or no room."""
        tree, node = self.tree, span.node
        if not tree.has_host or not node.alive or not node.root.hooked:
            return None
        path = tree.cover(node, span.first, min(span.last, node.end))
        found = self._to_save(path)
        if not found:
            return None
        where = {g: ranges(got) for g, got in found.items()}
        first = min([parts[0][0] for parts in where.values()])
        last = max([parts[-1][1] for parts in where.values()])
        sources = {(DEVICE, g): joined(got) for g, got in found.items()}
        need = {g: len(ids) for (_, g), ids in sources.items()}
        holder = hold(tree, node, (DEVICE,), (first, last), sources)
        if not self.room.has(HOST, need) and not self.make_room(node, (last,), need):
            holder.let_go(tree)
            self.ledger.counts["saves_skipped"] += 1
            return None
        parts: Parts = {}
        for (_, g), ids in sources.items():
            targets = tree.pools[HOST][g].allocate(len(ids), FLIGHT)
            if len(ids) < last - first:
                ids, targets = spread(where[g], ids, first, last), spread(where[g], targets, first, last)
            parts[g] = (ids, targets)
        node.tried = node.device.used
        operation, transfer = self.ledger.begin(HOST, node, first, last, parts, where, holder)
        for at, low, high in path:
            if at.start + low < last and at.start + high > first:
                at.saving = [*(at.saving or ()), transfer]
        return operation

    def make_room(self, node: Node, boundaries: tuple[int, ...], need: dict[int, int]) -> bool:
        """Evict from host what is least recently used, but nothing of the path that is about to be extended there: of
        the path to `node`, what requests that begin at these boundaries would read."""
        holder = self._keep(node, boundaries)
        fits = self.room.made(HOST, need)
        holder.let_go(self.tree)
        return fits

    def can_make_room(self, node: Node, boundaries: tuple[int, ...], need: dict[int, int]) -> bool:
        """Would `make_room` succeed? Nothing goes."""
        holder = self._keep(node, boundaries)
        fits = self.room.can_make(HOST, need)
        holder.let_go(self.tree)
        return fits

    def _keep(self, node: Node, boundaries: tuple[int, ...]) -> Holder:
        tree = self.tree
        kept: dict[tuple[int, int], Ids] = {}
        for g in tree.loose:
            ids = np.concatenate([self._window_on_host(node, g, at) for at in boundaries])
            if len(ids):
                kept[HOST, g] = ids if len(boundaries) == 1 else np.unique(ids)
        for g in tree.slots:
            snapshot = tree.copy_in(node, HOST).pages[g] if node.end in boundaries else None
            if snapshot:
                kept[HOST, g] = np.array([snapshot], np.int32)
        return hold(tree, node, (HOST,), (0, max(boundaries)), kept)

    def _window_on_host(self, node: Node, g: int, boundary: int) -> Ids:
        """What host has of the pages that a request beginning at `boundary` would read."""
        tree = self.tree
        found = [
            as_ids(tree.copy_in(at, HOST).pages[g][4 * first : 4 * high])
            for low, end in tree.families[g].pages_read(boundary * tree.page_size)
            for at, first, high in tree.cover(node, low, end)
            if tree.copy_in(at, HOST).pages[g] is not None
        ]
        ids = np.concatenate(found) if found else np.zeros(0, np.int32)
        held: Ids = ids[ids != 0]
        return held

    def _to_save(self, path: Cover) -> dict[int, list[Run]]:
        """By group: the device pages of `path` that host does not have, root side first."""
        tree = self.tree
        closed, slots = tree.closed, tree.slots
        found: dict[int, list[Run]] = {g: [] for g in self.savable}
        for node, low, high in reversed(path):
            host = node.host
            assert host is not None
            busy = node.promised or node.saving
            start = node.start
            for g, runs_found in found.items():
                pages = node.device.pages[g]
                if not pages:
                    continue
                first = low
                if g in closed:
                    if host.count > low:
                        first = host.count
                        if first >= high:
                            continue
                    ids = pages[4 * first : 4 * high]
                    simple = not busy
                elif g in slots:
                    if high == node.n and not host.pages[g] and not self._under_way(node, g):
                        runs_found.append((start + high - 1, pages.to_bytes(4, "little")))
                    continue
                else:
                    ids = pages[4 * first : 4 * high]
                    there = host.pages[g]
                    # Four zero bytes in a row are a hole, or two ids beside each other: only then look closer.
                    simple = not busy and HOLE not in ids
                    simple = simple and (not there or there.count(0, 4 * first, 4 * high) == len(ids))
                if simple:
                    runs_found.append((start + first, ids))
                else:
                    runs_found += self._unsaved(node, g, first, bytes(ids))
        return {g: got for g, got in found.items() if got}

    @staticmethod
    def _under_way(node: Node, g: int) -> bool:
        """Whether a save of the snapshot at the end of `node` is under way."""
        return node.saving is not None and any(save.covers(g, node.end - 1) for save in node.saving)

    def _unsaved(self, node: Node, g: int, first: int, ids: bytes) -> list[Run]:
        """Which of `ids`, the device pages of `node` from `first` on, should be saved: the careful way to look."""
        tree = self.tree
        closed = g in tree.closed
        pages = np.frombuffer(ids, np.int32)
        want = pages != 0
        there = tree.copy_in(node, HOST).pages[g]
        if not closed and there is not None:
            want &= np.frombuffer(bytes(there), np.int32)[first : first + len(pages)] == 0
        begin = node.start + first
        for at in want.nonzero()[0].tolist():
            for promise in node.promised or ():
                if promise.covers(g, begin + at, closed):
                    want[at] = False
            for save in node.saving or ():
                if save.covers(g, begin + at):
                    want[at] = False
        return [(begin + low, ids[4 * low : 4 * high]) for low, high in runs(want.nonzero()[0].astype(np.int32))]

    def save_done(self, op: int, ok: bool) -> Span | None:
        """The save is over. Returns what host has now, for a backup, or None if it failed or has nowhere to go."""
        transfer = self.ledger.end(op, HOST)
        tree, ledger = self.tree, self.ledger
        if transfer.holder.detached:
            ledger.counts["saves_failed"] += not ok
            ledger.free_targets(transfer)
            ledger.let_go(transfer)
            return None
        path = tree.cover(transfer.node, transfer.first, transfer.last)
        for node, _, _ in path:
            saving = node.saving
            assert saving is not None
            node.saving = None if len(saving) == 1 else [save for save in saving if save is not transfer]
        if not ok:
            ledger.counts["saves_failed"] += 1
            ledger.free_targets(transfer)
            ledger.let_go(transfer)
            return None
        landed = self.land(transfer, path)
        ledger.count(transfer, "saved", landed)
        ledger.let_go(transfer)
        return Span(transfer.first, transfer.last, transfer.node)

    def land(self, transfer: Transfer, path: Cover) -> Ranges:
        """What has come to host is the tree's now, or is freed where host has it already. `path` is what the transfer
        covers. Returns the ranges that landed, of any group."""
        tree, ledger = self.tree, self.ledger
        landed: Ranges = []
        for g, where in transfer.ranges.items():
            nodes = tree.nodes
            if g in tree.slots:
                kept = ledger.land_slot(transfer, g, where)
            elif g not in tree.closed:
                kept = ledger.land_loose(transfer, g, where, path)
            elif g == tree.closed[0]:
                kept = self._land_closed(transfer, where, path)
            else:
                continue
            if tree.nodes != nodes:  # one was split
                path = tree.cover(transfer.node, transfer.first, transfer.last)
            if g == tree.told:
                ledger.announce(transfer.node, HOST, kept)
            landed += kept
        for node, _, _ in path:
            node.host.used = tree.now  # type: ignore[union-attr]
        return landed

    def _land_closed(self, transfer: Transfer, where: Ranges, path: Cover) -> Ranges:
        """Host copies of closed groups: the first pages of each node. A gap before them becomes a node of its own."""
        tree, base = self.tree, transfer.first
        targets = {g: transfer.parts[g][1].tobytes() for g in tree.closed}
        kept: Ranges = []
        for low, high in reversed(where):
            whole = low == base and high == transfer.last
            for node, first, last in path if whole else tree.cover(transfer.node, low, high):
                copy = node.host
                assert copy is not None
                a, b = node.start + first, node.start + last
                if copy.count > first:
                    known = min(copy.count, last)
                    self.ledger.free_columns(transfer, a, node.start + known)
                    if known == last:
                        continue
                    a = node.start + known
                elif copy.count < first:
                    tree.split(node, first)
                tree.put_closed(node, HOST, {g: ids[4 * (a - base) : 4 * (b - base)] for g, ids in targets.items()})
                kept.append((a, b))
        self.ledger.tree_owns(transfer, tree.closed, kept)
        return kept
