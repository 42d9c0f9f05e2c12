"""Transfers between device and host: book-keeping only, no byte moves here.

A transfer pins what it reads and owns what it writes until it is acknowledged. It speaks of absolute pages of a path,
so a node may be split or grow meanwhile. Its copy is visible only after the acknowledgement; a failed one frees.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .announce import tell_stored
from .flight import note_promises
from .group import DEVICE, HOST
from .lease import Holder, Lease, Span
from .namespace import Namespace
from .node import Node
from .pool import FLIGHT, TREE, UNHOOKED, Ids
from .publish import runs
from .room import Room
from .tree import Tree, as_ids

Parts = dict[int, tuple[Ids, Ids]]


class Operation(NamedTuple):
    """What a caller carries out: for each group, source and target pages from `start_page` on; 0 = no part there."""

    op: int
    namespace: Namespace
    start_page: int
    pages: dict[str, tuple[Ids, Ids]]


class Transfer:
    """One save or load between its begin and its acknowledgement."""

    __slots__ = ("after", "first", "holder", "last", "node", "op", "parts", "tier", "waiters")

    def __init__(self, op: int, tier: int, node: Node, first: int, last: int, parts: Parts, holder: Holder) -> None:
        self.op = op
        self.tier = tier  # where it writes
        self.node = node
        self.first = first
        self.last = last
        self.parts = parts
        self.holder = holder
        self.waiters: list[Lease] = []
        self.after: list[Transfer] = []  # loads further down the path that arrived before this one


class Landed(NamedTuple):
    """What came of a load: leases that can go on, and leases whose pages did not come."""

    ready: list[Lease]
    failed: list[Lease]


class Transfers:
    def __init__(self, tree: Tree, room: Room) -> None:
        self.tree = tree
        self.room = room
        self.pending: dict[int, Transfer] = {}
        self.arrived: dict[int, Transfer] = {}  # acknowledged loads that wait for one above them
        self.next_op = 1
        self.saving = [np.zeros(pool.capacity + 1, np.bool_) for pool in tree.pools[DEVICE]]
        host = [bool(group.host_pages) for group in tree.groups]
        whole = all(host[g] for g in tree.closed)  # closed groups are on host together or not at all
        self.savable = [g for g, there in enumerate(host) if there and (whole or g not in tree.closed)]
        self.loading: dict[tuple[int, int], Transfer] = {}  # (group, host page) of groups that are not closed
        self.counts = {
            "saves": 0,
            "saves_failed": 0,
            "saves_skipped": 0,
            "loads": 0,
            "loads_failed": 0,
            "loads_joined": 0,
            "pages_saved": 0,
            "pages_loaded": 0,
        }

    # ---- saves

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
            self.counts["saves_skipped"] += 1
            return None
        parts: Parts = {}
        for g, (columns, ids) in found.items():
            targets = tree.pools[HOST][g].allocate(len(ids), FLIGHT)
            self.saving[g][ids] = True
            parts[g] = (spread(columns, ids, first, last), spread(columns, targets, first, last))
        return self._begin(HOST, node, first, last, parts, holder)

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
        transfer = self._end(op, HOST)
        tree = self.tree
        for g, (sources, _) in transfer.parts.items():
            self.saving[g][sources] = False
        if not ok or transfer.holder.detached:
            self.counts["saves_failed"] += not ok
            self._free_targets(transfer)
            self._let_go(transfer)
            return None
        for g, (_, targets) in transfer.parts.items():
            kept: list[tuple[int, int]] = []
            if g not in tree.closed:
                columns = targets.nonzero()[0].astype(np.int32)
                ids = targets[columns]
                land = self._land_slot if g in tree.slots else self._land_loose
                kept = land(transfer.node, HOST, g, columns + np.int32(transfer.first), ids)
            elif g == tree.closed[0]:
                kept = self._land_closed_on_host(transfer)
            if g == tree.told:
                self._announce(transfer.node, HOST, kept)
            self._count(transfer, "saved", sum(high - low for low, high in kept))
        for node, _, _ in tree.cover(transfer.node, transfer.first, transfer.last):
            tree.copy_in(node, HOST).used = tree.now
        self._let_go(transfer)
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
                    self._free_columns(transfer, node.start + first, node.start + known)
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

    def _free_columns(self, transfer: Transfer, low: int, high: int) -> None:
        for g in self.tree.closed:
            ids = transfer.parts[g][1][low - transfer.first : high - transfer.first]
            self.tree.pools[transfer.tier][g].release(ids[ids != 0], FLIGHT)

    # ---- loads

    def begin_load(
        self,
        lease: Lease,
        node: Node,
        first: int,
        last: int,
        wanted: dict[int, tuple[Ids, Ids]],
        joined: list[Transfer],
    ) -> Operation | None:
        """Start to bring `wanted` (by group: columns and host pages) to the device, for `lease`, which also waits
        for what others are loading already. The caller has seen that there is room."""
        tree = self.tree
        for transfer in joined:
            transfer.waiters.append(lease)
            lease.waits.append(transfer)
        self.counts["loads_joined"] += len(joined)
        if not wanted:
            return None
        held = {(HOST, g): ids for g, (_, ids) in wanted.items()}
        holder = Holder(tree, node, (DEVICE, HOST), (first, last), held)
        parts: Parts = {}
        for g, (columns, ids) in wanted.items():
            targets = tree.pools[DEVICE][g].allocate(len(ids), FLIGHT)
            parts[g] = (spread(columns, ids, first, last), spread(columns, targets, first, last))
        operation = self._begin(DEVICE, node, first, last, parts, holder)
        transfer = self.pending[operation.op]
        transfer.waiters.append(lease)
        lease.waits.append(transfer)
        for g, (columns, ids) in wanted.items():
            if g in tree.closed:
                for at, _, _ in tree.cover(node, int(columns[0]), int(columns[-1]) + 1):
                    if not at.device.count and at.loading is None:
                        at.loading = transfer
            else:
                for page in ids.tolist():
                    self.loading[g, page] = transfer
        return operation

    def load_done(self, op: int, ok: bool) -> Landed:
        transfer = self._end(op, DEVICE)
        landed = Landed([], [])
        queue = [(transfer, ok)]
        while queue:
            at, fine = queue.pop(0)
            if fine and not at.holder.detached and self._must_wait(at):
                continue
            self._land(at, fine, landed)
            queue += [(later, True) for later in at.after]
        return landed

    def _must_wait(self, transfer: Transfer) -> bool:
        """Pages are never on the device without those above them: a load that arrives first waits for the other."""
        tree = self.tree
        if not any(g in transfer.parts for g in tree.closed):
            return False
        above: Node | None = tree.cover(transfer.node, transfer.first, transfer.last)[-1][0].parent
        while above is not None and above.n and not above.device.count:
            if above.loading is not None and above.loading is not transfer and above.loading.op in self.pending:
                above.loading.after.append(transfer)
                self.arrived[transfer.op] = transfer
                return True
            above = above.parent
        return False

    def _land(self, transfer: Transfer, ok: bool, landed: Landed) -> None:
        tree = self.tree
        self.arrived.pop(transfer.op, None)
        waiters = [lease for lease in transfer.waiters if not lease.ended]
        for lease in waiters:
            lease.waits.remove(transfer)
        for g, (sources, _) in transfer.parts.items():
            if g not in tree.closed:
                for page in sources[sources != 0].tolist():
                    self.loading.pop((g, page), None)
        if transfer.holder.detached:
            if ok and waiters:
                self._give_privately(transfer, waiters)
            else:
                self._free_targets(transfer)
        else:
            for node, _, _ in tree.cover(transfer.node, transfer.first, transfer.last):
                if node.loading is transfer:
                    node.loading = None
            if ok and self._closed_above(transfer):
                self._land_on_device(transfer, waiters)
            else:
                ok = False
                self._free_targets(transfer)
        self._let_go(transfer)
        if not ok:
            self.counts["loads_failed"] += 1
            landed.failed.extend(lease for lease in waiters if lease not in landed.failed)
        else:
            landed.ready.extend(lease for lease in waiters if not lease.waits and lease not in landed.failed)

    def _closed_above(self, transfer: Transfer) -> bool:
        if not any(g in transfer.parts for g in self.tree.closed):
            return True
        above = self.tree.cover(transfer.node, transfer.first, transfer.last)[-1][0].parent
        return above is None or not above.n or above.device.count > 0

    def _land_on_device(self, transfer: Transfer, waiters: list[Lease]) -> None:
        tree = self.tree
        stored: list[tuple[int, int]] = []
        closed = [g for g in tree.closed if g in transfer.parts]
        if closed:
            for node, first, last in reversed(tree.cover(transfer.node, transfer.first, transfer.last)):
                a, b = node.start + first, node.start + last
                targets = transfer.parts[closed[0]][1][a - transfer.first : b - transfer.first]
                if not targets.any():
                    continue
                if node.device.count or first or last != node.n or not targets.all():
                    self._free_columns(transfer, a, b)  # it was computed meanwhile
                    continue
                pages = {}
                for g in closed:
                    ids = transfer.parts[g][1][a - transfer.first : b - transfer.first]
                    tree.pools[DEVICE][g].move(ids, FLIGHT, TREE)
                    pages[g] = ids.tobytes()
                tree.put_closed(node, DEVICE, pages)
                self._count(transfer, "loaded", last - first)
                if tree.told in closed:
                    stored.append((a, b))
        for g, (_, targets) in transfer.parts.items():
            if g in tree.closed:
                continue
            columns = targets.nonzero()[0].astype(np.int32) + np.int32(transfer.first)
            land = self._land_slot if g in tree.slots else self._land_loose
            kept = land(transfer.node, DEVICE, g, columns, targets[targets != 0])
            self._count(transfer, "loaded", sum(high - low for low, high in kept))
            if g == tree.told:
                stored += kept
            for lease in waiters:
                self._take(lease, g)
        for lease in waiters:
            note_promises(self.tree, lease)
        self._announce(transfer.node, DEVICE, stored)

    def _take(self, lease: Lease, g: int) -> None:
        """A waiting lease reads at once what has come for it, so that nobody evicts it before the lease goes on."""
        tree = self.tree
        pool = tree.pools[DEVICE][g]
        if g in tree.slots:
            at = lease.seed_node
            if at is not None and g not in lease.seed and at.device.pages[g]:
                lease.seed[g] = at.device.pages[g]
                pool.read(np.array([lease.seed[g]], np.int32))
            return
        table = np.frombuffer(lease.tables[g], np.int32)
        for low, high in lease.wanted.get(g, ()):
            for node, first, last in tree.cover(lease.node, low, high):
                pages = node.device.pages[g]
                if pages is None:
                    continue
                there = np.frombuffer(pages, np.int32)[first:last]
                mine = table[node.start + first : node.start + last]
                new = (mine == 0) & (there != 0)
                mine[new] = there[new]
                pool.read(there[new])

    def _give_privately(self, transfer: Transfer, waiters: list[Lease]) -> None:
        """Its namespace was unhooked meanwhile: what came goes to those who waited, and to nobody else."""
        tree = self.tree
        for g, (_, targets) in transfer.parts.items():
            pool = tree.pools[DEVICE][g]
            ids = targets[targets != 0]
            columns = targets.nonzero()[0] + transfer.first
            pool.move(ids, FLIGHT, UNHOOKED)
            for lease in waiters:
                if g in tree.slots:
                    if g not in lease.seed and int(columns[0]) + 1 == lease.boundary:
                        lease.seed[g] = int(ids[0])
                        pool.readers[ids] += 1
                    continue
                spans = [(0, lease.boundary)] if g in tree.closed else lease.wanted.get(g, [])
                if len(lease.tables[g]) < 4 * lease.boundary:
                    lease.tables[g].extend(bytes(4 * lease.boundary - len(lease.tables[g])))
                lease.upto[g] = max(lease.upto[g], lease.boundary)  # given, not private: others may read them too
                table = np.frombuffer(lease.tables[g], np.int32)
                for low, high in spans:
                    inside = (columns >= low) & (columns < high)
                    at, pages = columns[inside], ids[inside]
                    new = table[at] == 0
                    table[at[new]] = pages[new]
                    pool.readers[pages[new]] += 1
            pool.release(ids[pool.readers[ids] == 0], UNHOOKED)

    # ---- shared

    def _begin(self, tier: int, node: Node, first: int, last: int, parts: Parts, holder: Holder) -> Operation:
        op = self.next_op
        self.next_op += 1
        self.pending[op] = Transfer(op, tier, node, first, last, parts, holder)
        node.moving += 1
        self.counts["saves" if tier else "loads"] += 1
        names = self.tree.groups
        return Operation(op, node.root.namespace, first, {names[g].name: arrays for g, arrays in parts.items()})

    def _end(self, op: int, tier: int) -> Transfer:
        transfer = self.pending.get(op)
        if transfer is None or transfer.tier != tier:
            raise ValueError(f"no {'save' if tier else 'load'} with number {op!r} is under way")
        del self.pending[op]
        return transfer

    def _let_go(self, transfer: Transfer) -> None:
        transfer.node.moving -= 1
        transfer.holder.let_go(self.tree)

    def _count(self, transfer: Transfer, what: str, pages: int) -> None:
        self.counts[f"pages_{what}"] += pages
        transfer.node.root.tally[f"{what}_pages"] += pages

    def _free_targets(self, transfer: Transfer) -> None:
        for g, (_, targets) in transfer.parts.items():
            self.tree.pools[transfer.tier][g].release(targets[targets != 0], FLIGHT)

    def _land_loose(self, node: Node, tier: int, g: int, columns: Ids, ids: Ids) -> list[tuple[int, int]]:
        """Put pages into the holes of a path; where one was filled meanwhile, free. Returns the filled ranges."""
        tree = self.tree
        pool = tree.pools[tier][g]
        kept: list[tuple[int, int]] = []
        first, last = int(columns[0]), int(columns[-1]) + 1
        for at, low, high in tree.cover(node, first, last):
            copy = tree.copy_in(at, tier)
            if last - first == len(columns):
                a = at.start + low - first
                where, pages = np.arange(low, high, dtype=np.int32), ids[a : a + high - low]
            else:
                inside = (columns >= at.start + low) & (columns < at.start + high)
                where, pages = columns[inside] - at.start, ids[inside]
                if not len(where):
                    continue
            if copy.pages[g] is None:
                copy.pages[g] = bytearray(4 * at.n)
            view = np.frombuffer(copy.pages[g], np.int32)
            taken = view[where]
            if taken.any():
                pool.release(pages[taken != 0], FLIGHT)
                where, pages = where[taken == 0], pages[taken == 0]
            view[where] = pages
            pool.move(pages, FLIGHT, TREE)
            pool.idle += len(pages)
            tree.queues[g, tier].add(at, copy)
            kept += [(x + at.start, y + at.start) for x, y in runs(where)]
        return kept

    def _land_slot(self, node: Node, tier: int, g: int, columns: Ids, ids: Ids) -> list[tuple[int, int]]:
        kept = []
        for column, slot in zip(columns.tolist(), ids, strict=True):
            at = self.tree.node_ending(node, column + 1)
            if put_slot(self.tree, at, tier, g, int(slot)):
                kept.append((column, column + 1))
        return kept

    def _announce(self, node: Node, tier: int, ranges: list[tuple[int, int]]) -> None:
        """Tell of ranges that came, those nearest the root first, neighbours in one breath."""
        if not self.tree.announcing or not ranges:
            return
        ranges.sort()
        first, last = ranges[0]
        for low, high in ranges[1:]:
            if low != last:
                tell_stored(self.tree, node, tier, first, last)
                first = low
            last = high
        tell_stored(self.tree, node, tier, first, last)


def spread(columns: Ids, ids: Ids, first: int, last: int) -> Ids:
    """`ids` at their columns in an array for the pages [first, last), 0 elsewhere."""
    if len(ids) == last - first:
        return ids
    array = np.zeros(last - first, np.int32)
    array[columns - first] = ids
    return array


def put_slot(tree: Tree, node: Node, tier: int, g: int, slot: int) -> bool:
    """A snapshot in flight becomes the tree's at the end of `node`; it is freed if there is one already."""
    pool = tree.pools[tier][g]
    ids = np.array([slot], np.int32)
    copy = tree.copy_in(node, tier)
    if copy.pages[g]:
        pool.release(ids, FLIGHT)
        return False
    pool.move(ids, FLIGHT, TREE)
    pool.idle += 1
    copy.pages[g] = slot
    tree.queues[g, tier].add(node, copy)
    return True
