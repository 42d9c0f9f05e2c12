"""Loads: from host to the device for leases that wait, each page once however many want it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .flight import note_promises
from .group import DEVICE, HOST
from .lease import Lease
from .node import Node
from .page_ids import Ids, as_ids, lengthened, runs, runs_of, spread
from .pool import FLIGHT, UNHOOKED
from .readers import read
from .transfer import Operation, Parts, PendingTransfers, Transfer
from .tree import Tree


class Landed(NamedTuple):
    """What came of a load: leases that can go on, and leases whose pages did not come."""

    ready: list[Lease]
    failed: list[Lease]


class Loads:
    def __init__(self, tree: Tree, transfers: PendingTransfers) -> None:
        self.tree = tree
        self.transfers = transfers
        self.arrived: dict[int, Transfer] = {}  # acknowledged loads that wait for one above them
        self.loading: dict[tuple[int, int], Transfer] = {}  # (group, host page) of groups that are not closed

    def begin_load(
        self,
        lease: Lease,
        wanted: dict[int, tuple[Ids, Ids]],
        joined: list[Transfer],
    ) -> Operation | None:
        """Start to bring `wanted` (by group: columns and host pages) to the device, for `lease`, which also waits
        for what others are loading already. The caller has seen that there is room."""
        tree = self.tree
        for transfer in joined:
            transfer.waiters.append(lease)
            lease.waits.append(transfer)
        self.transfers.counts["loads_joined"] += len(joined)
        if not wanted:
            return None
        node = lease.node
        first = min(int(columns.min()) for columns, _ in wanted.values())
        last = max(int(columns.max()) + 1 for columns, _ in wanted.values())
        held = {(HOST, g): ids.tobytes() for g, (_, ids) in wanted.items()}
        parts: Parts = {}
        where = {g: runs(columns) for g, (columns, _) in wanted.items()}
        spans = {(HOST, g): where[g] for g in tree.sliding if g in where}
        came = {}
        for g, (_, ids) in wanted.items():
            targets = came[g] = tree.device.pools[g].allocate(len(ids), FLIGHT)
            wide = spread(where[g], ids.tobytes(), first, last), spread(where[g], targets, first, last)
            parts[g] = (as_ids(wide[0]), as_ids(wide[1]))
        op, both = self.transfers.number(), (DEVICE, HOST)
        transfer = Transfer(tree, op, DEVICE, node, (first, last), parts, where, came, both, held, spans)
        operation = self.transfers.begin(transfer)
        transfer.waiters.append(lease)
        lease.waits.append(transfer)
        for g, (columns, ids) in wanted.items():
            if g in tree.closed:
                for at, _, _ in tree.cover(node, int(columns[0]), int(columns[-1]) + 1):
                    if not at.copies[DEVICE].count and at.loading is None:
                        at.loading = transfer
            else:
                for page in ids.tolist():
                    self.loading[g, page] = transfer
        return operation

    def load_done(self, op: int, ok: bool) -> Landed:
        transfer = self.transfers.end(op, DEVICE)
        landed = Landed([], [])
        queue = [(transfer, ok)]
        while queue:
            at, fine = queue.pop(0)
            if fine and not at.detached and self._must_wait(at):
                continue
            self._land(at, fine, landed)
            queue += [(later, True) for later in at.after]
        return landed

    def _must_wait(self, transfer: Transfer) -> bool:
        """Pages are never on the device without those above them: a load that arrives first waits for the other."""
        above = self._above(transfer)
        while above is not None and above.n and not above.copies[DEVICE].count:
            if (
                above.loading is not None
                and above.loading is not transfer
                and above.loading.op in self.transfers.pending
            ):
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
        if transfer.detached:
            if ok and waiters:
                self._give_privately(transfer, waiters)
            else:
                self.transfers.free_targets(transfer)
        else:
            for node, _, _ in tree.cover(transfer.node, transfer.first, transfer.last):
                if node.loading is transfer:
                    node.loading = None
            if ok and self._closed_above(transfer) and not self._below_promises(transfer):
                self._land_on_device(transfer, waiters)
            else:
                ok = False
                self.transfers.free_targets(transfer)
        transfer.let_go(tree)
        if not ok:
            self.transfers.counts["loads_failed"] += 1
            landed.failed.extend(lease for lease in waiters if lease not in landed.failed)
        else:
            landed.ready.extend(lease for lease in waiters if not lease.waits and lease not in landed.failed)

    def _above(self, transfer: Transfer) -> Node | None:
        """The node above the first pages that it brings of closed groups, if it does."""
        for g in self.tree.closed:
            if g in transfer.parts:
                column = transfer.ranges[g][0][0]
                return self.tree.cover(transfer.node, column, column + 1)[0][0].parent
        return None

    def _closed_above(self, transfer: Transfer) -> bool:
        """Whether all it brings of closed groups would stand below pages that are there. Not if a load above it failed,
        or one between two parts of it, which it had joined, has not come: then it is freed, and its requests do without
        host."""
        tree, above = self.tree, self._above(transfer)
        if above is not None and above.n and not above.copies[DEVICE].count:
            return False
        for g in tree.closed:
            if g in transfer.parts:
                targets, base = transfer.parts[g][1], transfer.first
                where = transfer.ranges[g]
                for node, first, last in tree.cover(transfer.node, where[0][0], where[-1][1]):
                    if (
                        not node.copies[DEVICE].count
                        and not targets[node.start + first - base : node.start + last - base].all()
                    ):
                        return False
        return True

    def _below_promises(self, transfer: Transfer) -> bool:
        """Whether some of it would stand below pages that a step in flight has only promised: they go if it fails."""
        tree, node = self.tree, transfer.node
        if not any(g in transfer.parts for g in tree.closed):
            return False
        promised = tree.first_promised(node)
        brought = tree.cover(node, transfer.first, node.end)
        return any(at.end > promised and not at.copies[DEVICE].count for at, _, _ in brought)

    def _land_on_device(self, transfer: Transfer, waiters: list[Lease]) -> None:
        self.transfers.land(transfer, "loaded")
        for lease in waiters:
            for g in transfer.ranges:
                if g not in self.tree.closed:
                    self._take(lease, g)
            note_promises(self.tree, lease)

    def _take(self, lease: Lease, g: int) -> None:
        """A waiting lease reads at once what has come for it, so that it is not evicted before the lease goes on."""
        tree = self.tree
        pool = tree.device.pools[g]
        if g in tree.slots:
            depth = lease.seed_depth
            if depth and g not in lease.start_snapshot:
                slot = (tree.node_at(lease.node, depth).copies[DEVICE].pages[g] or {}).get(depth)
                if slot:
                    lease.start_snapshot[g] = slot
                    pool.read(slot)
            return
        table = np.frombuffer(lease.tables[g], np.int32)
        for low, high in lease.wanted.get(g, ()):
            for node, first, last in tree.cover(lease.node, low, high):
                pages = node.copies[DEVICE].pages[g]
                if pages is None:
                    continue
                there = np.frombuffer(pages, np.int32)[first:last]
                mine = table[node.start + first : node.start + first + len(there)]
                new = (mine == 0) & (there != 0)
                mine[new] = there[new]
                del there
                for a, b in runs_of(new) if lease.counted else ():
                    read(tree, node, DEVICE, g, node.start + first + a, node.start + first + b)

    def _give_privately(self, transfer: Transfer, waiters: list[Lease]) -> None:
        """Its namespace was unhooked meanwhile: what came goes to the leases that waited, and to no other. One that
        joined for the first pages may go another way below them: each gets what lies on its own path."""
        tree = self.tree
        for g, (_, targets) in transfer.parts.items():
            pool = tree.device.pools[g]
            ids = targets[targets != 0]
            columns = targets.nonzero()[0] + transfer.first
            pool.move(ids.tobytes(), FLIGHT, UNHOOKED)
            for lease in waiters:
                shared = lease.shared[transfer]
                if g in tree.slots:
                    if g not in lease.start_snapshot and int(columns[0]) + 1 == lease.boundary <= shared:
                        lease.start_snapshot[g] = int(ids[0])
                        pool.read_unhooked(ids.tobytes())
                    continue
                spans = [(0, lease.boundary)] if g in tree.closed else lease.wanted.get(g, [])
                lease.tables[g] = lengthened(lease.tables[g], lease.boundary)
                lease.upto[g] = max(lease.upto[g], lease.boundary)  # given, not private: others may read them too
                table = np.frombuffer(lease.tables[g], np.int32)
                for low, high in spans:
                    inside = (columns >= low) & (columns < min(high, shared))
                    at, pages = columns[inside], ids[inside]
                    new = table[at] == 0
                    table[at[new]] = pages[new]
                    pool.read_unhooked(pages[new].tobytes())
            pool.release(ids[pool.readers[ids] == 0].tobytes(), UNHOOKED)
