"""Saves: which real pages host does not have, room for them there, and what is visible once they have arrived."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .group import DEVICE, HOST
from .lease import Holder, Span
from .node import Node
from .pool import FLIGHT, TREE, Ids
from .publish import runs
from .room import Room
from .transfer import Ledger, Operation, Parts, Transfer, spread
from .tree import Tree, as_ids


class Saves:
    def __init__(self, tree: Tree, room: Room, ledger: Ledger) -> None:
        self.tree = tree
        self.room = room
        self.ledger = ledger
        self.saving = [np.zeros(pool.capacity + 1, np.bool_) for pool in tree.pools[DEVICE]]
        host = [bool(group.host_pages) for group in tree.groups]
        whole = all(host[g] for g in tree.closed)  # closed groups are on host together or not at all
        self.savable = [g for g, there in enumerate(host) if there and (whole or g not in tree.closed)]

    def begin_save(self, span: Span) -> Operation | None:
        """Start to copy to host what of `span` is not there and not on its way. None: nothing to do, or no room."""
        tree, node = self.tree, span.node
        if not tree.has_host or not node.alive or not node.root.hooked:
            return None
        found = self._to_save(span)
        if not found:
            return None
        first = min(int(columns[0]) for columns, _ in found.values())
        last = max(int(columns[-1]) for columns, _ in found.values()) + 1
        need = {g: len(ids) for g, (_, ids) in found.items()}
        holder = Holder(tree, node, (DEVICE,), (first, last), {(DEVICE, g): ids for g, (_, ids) in found.items()})
        if not self.room.has(HOST, need) and not self._make_room(node, last, need):
            holder.let_go(tree)
            self.ledger.counts["saves_skipped"] += 1
            return None
        parts: Parts = {}
        for g, (columns, ids) in found.items():
            targets = tree.pools[HOST][g].allocate(len(ids), FLIGHT)
            self.saving[g][ids] = True
            parts[g] = (spread(columns, ids, first, last), spread(columns, targets, first, last))
        return self.ledger.begin(HOST, node, first, last, parts, holder)

    def _make_room(self, node: Node, last: int, need: dict[int, int]) -> bool:
        """Evict from host what is least recently used, but nothing of the path that is about to be extended there."""
        tree = self.tree
        kept: dict[tuple[int, int], Ids] = {}
        for g in tree.loose:
            ids = self._window_on_host(node, g, last)
            if len(ids):
                kept[HOST, g] = ids
        holder = Holder(tree, node, (HOST,), (0, last), kept)
        fits = self.room.can_make(HOST, need)
        if fits:
            self.room.make(HOST, need)
        holder.let_go(tree)
        return fits

    def _window_on_host(self, node: Node, g: int, last: int) -> Ids:
        """What host has of the pages that a request beginning at page `last` would read."""
        tree = self.tree
        found = [
            as_ids(tree.copy_in(at, HOST).pages[g][4 * first : 4 * high])
            for low, end in tree.families[g].pages_read(last * tree.page_size)
            for at, first, high in tree.cover(node, low, end)
            if tree.copy_in(at, HOST).pages[g] is not None
        ]
        ids = np.concatenate(found) if found else np.zeros(0, np.int32)
        held: Ids = ids[ids != 0]
        return held

    def _to_save(self, span: Span) -> dict[int, tuple[Ids, Ids]]:
        """By group: the columns of `span` (and their device pages) that host does not have."""
        tree = self.tree
        found: dict[int, list[tuple[Ids, Ids]]] = {}
        for node, low, high in reversed(tree.cover(span.node, span.first, min(span.last, span.node.end))):
            host = node.host
            assert host is not None
            for g in self.savable:
                pages = node.device.pages[g]
                if not pages:
                    continue
                if g in tree.slots:
                    if high == node.n and not host.pages[g] and not self.saving[g][pages]:
                        found.setdefault(g, []).append(
                            (np.array([node.end - 1], np.int32), np.array([pages], np.int32))
                        )
                    continue
                first = max(low, host.count) if g in tree.closed else low
                if first < high:
                    ids = np.frombuffer(bytes(pages[4 * first : 4 * high]), np.int32)
                    at = self._unsaved(node, g, first, ids)
                    if at is None:
                        columns = np.arange(node.start + first, node.start + high, dtype=np.int32)
                    else:
                        columns, ids = (at + (node.start + first)).astype(np.int32), ids[at]
                    if len(ids):
                        found.setdefault(g, []).append((columns, ids))
        return {
            g: got[0] if len(got) == 1 else (np.concatenate([c for c, _ in got]), np.concatenate([i for _, i in got]))
            for g, got in found.items()
        }

    def _unsaved(self, node: Node, g: int, first: int, ids: Ids) -> npt.NDArray[np.intp] | None:
        """Which of `ids`, the device pages of `node` from `first` on, should be saved. None: all of them."""
        tree = self.tree
        host = tree.copy_in(node, HOST)
        loose = g in tree.loose
        busy = self.saving[g][ids]
        holes = loose and not ids.all()
        there = loose and host.pages[g] is not None
        if 1 not in busy.tobytes() and not holes and not there and not node.promised:
            return None
        want = (ids != 0) & ~busy
        if there:
            want &= np.frombuffer(bytes(host.pages[g]), np.int32)[first : first + len(ids)] == 0
        for promise in node.promised or ():
            for at in want.nonzero()[0].tolist():
                if promise.covers(g, node.start + first + at, not loose):
                    want[at] = False
        columns: npt.NDArray[np.intp] = want.nonzero()[0]
        return columns

    def save_done(self, op: int, ok: bool) -> Span | None:
        """The save is over. Returns what host has now, for a backup, or None if it failed or has nowhere to go."""
        transfer = self.ledger.end(op, HOST)
        tree = self.tree
        for g, (sources, _) in transfer.parts.items():
            self.saving[g][sources] = False
        if not ok or transfer.holder.detached:
            self.ledger.counts["saves_failed"] += not ok
            self.ledger.free_targets(transfer)
            self.ledger.let_go(transfer)
            return None
        for g, (_, targets) in transfer.parts.items():
            kept: list[tuple[int, int]] = []
            if g not in tree.closed:
                columns = targets.nonzero()[0].astype(np.int32)
                ids = targets[columns]
                land = self.ledger.land_slot if g in tree.slots else self.ledger.land_loose
                kept = land(transfer.node, HOST, g, columns + np.int32(transfer.first), ids)
            elif g == tree.closed[0]:
                kept = self._land_closed_on_host(transfer)
            if g == tree.told:
                self.ledger.announce(transfer.node, HOST, kept)
            self.ledger.count(transfer, "saved", sum(high - low for low, high in kept))
        for node, _, _ in tree.cover(transfer.node, transfer.first, transfer.last):
            tree.copy_in(node, HOST).used = tree.now
        self.ledger.let_go(transfer)
        return Span(transfer.first, transfer.last, transfer.node)

    def _land_closed_on_host(self, transfer: Transfer) -> list[tuple[int, int]]:
        """Host copies of closed groups: the first pages of each node. A gap before them becomes a node of its own."""
        tree = self.tree
        kept: list[tuple[int, int]] = []
        targets = transfer.parts[tree.closed[0]][1]
        for low, high in reversed(runs(targets.nonzero()[0].astype(np.int32) + np.int32(transfer.first))):
            for node, first, last in tree.cover(transfer.node, low, high):
                copy = tree.copy_in(node, HOST)
                known = min(max(copy.count, first), last)
                if known > first:
                    self.ledger.free_columns(transfer, node.start + first, node.start + known)
                if known == last:
                    continue
                a, b = node.start + known, node.start + last
                if copy.count < known:
                    tree.split(node, known)
                pages = {}
                for g in tree.closed:
                    ids = transfer.parts[g][1][a - transfer.first : b - transfer.first]
                    tree.pools[HOST][g].move(ids, FLIGHT, TREE)
                    pages[g] = ids.tobytes()
                tree.put_closed(node, HOST, pages)
                kept.append((a, b))
        return kept
