"""From a match to a lease: all groups are admitted, or none. A dry run comes first and changes nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .flight import note_promises
from .group import DEVICE, HOST
from .lease import Holder, Lease, Match, Sibling
from .node import Node
from .path import Path
from .pool import LEASE, Ids
from .room import Room
from .transfer import Operation, Transfer, Transfers
from .tree import Tree


class Wish(NamedTuple):
    """What an admission will read and take, found without changing anything."""

    depth: int  # the anchor
    reads: dict[int, list[tuple[int, int]]]  # groups that are not closed: columns to read
    upto: dict[int, int]  # groups that are not closed: columns the tree has
    load: dict[int, tuple[Ids, Ids]]  # columns and host pages to bring
    joined: list[Transfer]
    seeds: dict[int, int]  # snapshots on the device
    need: dict[int, int]  # device pages to take
    less: dict[int, int]  # device pages it reads that eviction could have taken


class Desk:
    """Where requests come in."""

    def __init__(self, tree: Tree, room: Room, transfers: Transfers) -> None:
        self.tree = tree
        self.room = room
        self.transfers = transfers

    def wish(self, match: Match, upto: int) -> Wish:
        """What it takes to admit `match` and give it pages up to token `upto`."""
        tree = self.tree
        path, boundary, size = match.path, match.boundary, tree.page_size
        depth = path.device_closed(path.depth) if tree.closed else path.depth
        load: dict[int, tuple[Ids, Ids]] = {}
        joined: list[Transfer] = []
        seeds: dict[int, int] = {}
        reads: dict[int, list[tuple[int, int]]] = {}
        ends: dict[int, int] = {}
        if match.load:
            if tree.closed and depth < boundary:
                self._load_closed(path, depth, boundary, load, joined)
            depth = max(depth, boundary)
            upto = 0
        columns = -(-upto // size)
        need: dict[int, int] = {}
        less: dict[int, int] = {}
        if tree.closed:
            pinned = self._would_pin(path, depth)
            for g in tree.closed:
                need[g] = max(0, columns - depth) + (len(load[g][0]) if g in load else 0)
                less[g] = pinned
        for g in tree.loose:
            spans = tree.families[g].columns(boundary, match.length)
            end = boundary
            if not match.load and depth > boundary:
                end = self._run(path, g, boundary, depth)
                if end > boundary:
                    spans = [*spans, (boundary, end)]
            reads[g], ends[g] = spans, end
            there = self._see(path, g, spans, load, joined)
            pool = tree.pools[DEVICE][g]
            less[g] = int(np.count_nonzero(pool.readers[there] == 0))
            need[g] = max(0, columns - end) + (len(load[g][0]) if g in load else 0)
        for g in tree.slots:
            need[g], less[g] = 1, 0
            if boundary:
                node = next(node for node in path.nodes if node.end == boundary)
                slot = node.device.pages[g]
                if slot:
                    seeds[g] = slot
                    less[g] = int(tree.pools[DEVICE][g].readers[slot] == 0)
                else:
                    assert node.host is not None
                    self._load_one(g, boundary - 1, node.host.pages[g], load, joined)
                    need[g] += 1 if g in load else 0
        return Wish(depth, reads, ends, load, joined, seeds, need, less)

    def _load_closed(
        self, path: Path, first: int, last: int, load: dict[int, tuple[Ids, Ids]], joined: list[Transfer]
    ) -> None:
        tree = self.tree
        parts: list[tuple[Node, int]] = []
        for node in path.nodes:
            if node.end <= first or node.start >= last:
                continue
            if node.loading is not None:
                if node.loading not in joined:
                    joined.append(node.loading)
            else:
                parts.append((node, min(node.n, last - node.start)))
        if not parts:
            return
        columns = np.concatenate([np.arange(n.start, n.start + k, dtype=np.int32) for n, k in parts])
        for g in tree.closed:
            ids = b"".join(bytes(tree.copy_in(n, HOST).pages[g][: 4 * k]) for n, k in parts)
            load[g] = (columns, np.frombuffer(ids, np.int32))

    def _load_one(
        self, g: int, column: int, page: int, load: dict[int, tuple[Ids, Ids]], joined: list[Transfer]
    ) -> None:
        transfer = self.transfers.loading.get((g, page))
        if transfer is not None:
            if transfer not in joined:
                joined.append(transfer)
            return
        columns, ids = load.get(g, (np.zeros(0, np.int32), np.zeros(0, np.int32)))
        load[g] = (np.append(columns, np.int32(column)), np.append(ids, np.int32(page)))

    def _see(
        self, path: Path, g: int, spans: list[tuple[int, int]], load: dict[int, tuple[Ids, Ids]], joined: list[Transfer]
    ) -> Ids:
        """The device pages of `g` in `spans`; where there is only a host page, it is put down for loading."""
        found: list[Ids] = []
        for low, high in spans:
            for node in path.nodes:
                if node.end <= low or node.start >= high:
                    continue
                first, last = max(low - node.start, 0), min(high - node.start, node.n)
                pages = node.device.pages[g]
                here = (
                    np.frombuffer(bytes(pages), np.int32)[first:last]
                    if pages is not None
                    else np.zeros(last - first, np.int32)
                )
                found.append(here[here != 0])
                for at in (here == 0).nonzero()[0].tolist():
                    host = node.host.pages[g] if node.host is not None else None
                    page = int.from_bytes(host[4 * (first + at) : 4 * (first + at) + 4], "little") if host else 0
                    assert page, "a boundary was offered that cannot be served"
                    self._load_one(g, node.start + first + at, page, load, joined)
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    @staticmethod
    def _run(path: Path, g: int, low: int, high: int) -> int:
        """How far the device has every page of `g` from `low` on, at most to `high`."""
        for node in path.nodes:
            if node.end <= low or node.start >= high:
                continue
            first, last = max(low - node.start, 0), min(high - node.start, node.n)
            pages = node.device.pages[g]
            if pages is None:
                return node.start + first
            hole = (np.frombuffer(bytes(pages), np.int32)[first:last] == 0).nonzero()[0]
            if len(hole):
                return node.start + first + int(hole[0])
        return high

    @staticmethod
    def _would_pin(path: Path, depth: int) -> int:
        """How many evictable closed device pages a pin at `depth` would take out of reach."""
        pinned = 0
        for node in reversed(path.nodes):
            if node.start >= depth:
                continue
            if node.device.holds:
                break
            pinned += min(node.device.count, depth - node.start)
        return pinned

    def admit(self, match: Match, upto: int) -> tuple[Lease, Operation | None] | None:
        """A lease on everything `match` promised, with private pages up to token `upto`; or None, nothing changed."""
        tree, room = self.tree, self.room
        wish = self.wish(match, upto)
        if not room.can_make(DEVICE, wish.need, wish.less):
            return None
        sibling = match.sibling
        if sibling is not None:
            extra = self._sibling_cost(sibling)
            less = {g: wish.less.get(g, 0) + extra[g] for g in range(len(tree.groups))}
            if not room.can_make(DEVICE, wish.need, less):
                sibling = None
        lease = self._open(match, wish)
        if sibling is not None:
            self._hold_sibling(lease, sibling)
        # Everything it reads is held: what is evicted now is somebody else's.
        room.make(DEVICE, wish.need)
        operation = None
        if wish.load or wish.joined:
            columns = [c for c, _ in wish.load.values()]
            first = min((int(c.min()) for c in columns), default=0)
            last = max((int(c.max()) + 1 for c in columns), default=0)
            operation = self.transfers.begin_load(lease, lease.node, first, last, wish.load, wish.joined)
        for g in tree.slots:
            slot = tree.pools[DEVICE][g].allocate(1, LEASE)
            lease.working[g] = int(slot[0])
            lease.tables[g] = bytearray(slot.tobytes())
        if not lease.waits:
            self.seat(lease)
            self.extend(lease, upto)
        return lease, operation

    def _open(self, match: Match, wish: Wish) -> Lease:
        """Pin the path and read the pages the lease needs of it."""
        tree = self.tree
        root = match.binding._root
        path = match.path
        node = root.top
        if wish.depth:
            last = next(n for n in reversed(path.nodes) if n.start < wish.depth)
            node = last if last.end == wish.depth else tree.split(last, wish.depth - last.start)
        seed_node = tree.node_ending(node, match.boundary) if tree.slots and match.boundary else None
        lease = Lease(match.binding, node, wish.depth, len(tree.groups))
        root.holders[lease] = None
        if root.hooked:
            tree.pin(node, DEVICE)
        else:
            lease.detached = True
            tree.unhooked[root] = None
        lease.boundary = match.boundary
        lease.length = match.length
        lease.start = min(match.boundary * tree.page_size, match.length - 1)
        lease.seed_node = seed_node
        if match.load:
            lease.wanted = wish.reads
        for g, slot in wish.seeds.items():
            tree.pools[DEVICE][g].read(np.array([slot], np.int32))
            lease.seed[g] = slot
        if seed_node is not None:
            seed_node.device.used = tree.now
        for g in tree.loose:
            end = wish.upto[g]
            table = np.zeros(end, np.int32)
            pool = tree.pools[DEVICE][g]
            for low, high in wish.reads[g]:
                for at, first, last_ in tree.cover(node, low, high):
                    pages = at.device.pages[g]
                    at.device.used = tree.now
                    if pages is not None:
                        there = np.frombuffer(bytes(pages), np.int32)[first:last_]
                        table[at.start + first : at.start + last_] = there
                        pool.read(there[there != 0])
            lease.tables[g] = bytearray(table.tobytes())
            lease.upto[g] = end
            lease.low[g] = wish.reads[g][0][0] if wish.reads[g] else end
        note_promises(lease)
        if match.cuts and not lease.detached:
            lease.cuts = match.cuts
            lease.tokens = match.tokens
            root.makers.setdefault(match.tokens[: tree.page_bytes], []).append(lease)
        return lease

    def seat(self, lease: Lease) -> None:
        """All pages of the path are on the device: the lease's tables follow it."""
        tree = self.tree
        if lease.detached:
            for g in tree.closed:
                lease.upto[g] = len(lease.tables[g]) // 4
            return
        nodes = tree.path_to(lease.node).nodes
        for g in tree.closed:
            lease.tables[g] = bytearray().join([node.device.pages[g] for node in nodes])
            lease.upto[g] = lease.depth
        lease.wanted = {}

    def extend(self, lease: Lease, upto: int) -> None:
        """Give the lease private pages up to token `upto`. The room is there."""
        tree = self.tree
        columns = -(-upto // tree.page_size)
        for g in tree.closed + tree.loose:
            table = lease.tables[g]
            more = columns - len(table) // 4
            if more > 0:
                table += tree.pools[DEVICE][g].allocate(more, LEASE).tobytes()

    # ---- copy on write

    def _sibling_cost(self, sibling: Sibling) -> list[int]:
        """Device pages that holding the source keeps eviction from taking."""
        tree = self.tree
        costs = [0] * len(tree.groups)
        node: Node | None = sibling.node
        closed = 0
        while node is not None and not node.device.holds:
            closed += node.device.count
            node = node.parent
        for g in tree.closed:
            costs[g] = closed
        for g in tree.loose:
            costs[g] = 1
        return costs

    def _hold_sibling(self, lease: Lease, sibling: Sibling) -> None:
        tree = self.tree
        # The anchor's own split may have cut the sibling's node; its lower half kept the identity.
        ((node, at, _),) = tree.cover(sibling.node, sibling.column, sibling.column + 1)
        pages = {
            (DEVICE, g): np.frombuffer(bytes(node.device.pages[g][4 * at : 4 * at + 4]), np.int32)
            for g in tree.closed + tree.loose
        }
        lease.source = Holder(tree, sibling.node, (DEVICE,), (sibling.column, sibling.column + 1), pages)
        lease.copied = sibling.tokens
        lease.start += sibling.tokens
