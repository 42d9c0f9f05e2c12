"""The invariants, recomputed from nothing and compared with what is kept. Slow and thorough: for tests."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from .group import DEVICE, HOST, TIERS
from .hashes import DIGEST_BYTES, chain, count_of, is_hashed, last_digest
from .host_pins import HostPins
from .lease import Lease, PinHolder
from .load import Loads
from .node import Node
from .page_ids import Ids, Ranges, as_ids
from .pool import FLIGHT, FREE, LEASE, TREE, UNHOOKED
from .roots import Root
from .steps import StepCommits
from .stored import StoreFetches
from .transfer import Transfer
from .tree import Tree

_HASHED_PAGES = 3000  # verify the hashes of trees up to this size


def check(
    tree: Tree, loads: Loads, stored: StoreFetches, host_pins: HostPins, steps: StepCommits, leases: dict[Lease, None]
) -> None:
    """Raise AssertionError with what is wrong."""
    _Check(tree, loads, stored, host_pins, steps, leases).run()


class _Check:
    def __init__(
        self,
        tree: Tree,
        loads: Loads,
        stored: StoreFetches,
        host_pins: HostPins,
        steps: StepCommits,
        leases: dict[Lease, None],
    ) -> None:
        self.tree = tree
        self.loads = loads
        self.stored = stored
        self.host_pins = host_pins
        self.steps = steps
        self.leases = leases
        self.owner = [[np.zeros(p.capacity + 1, np.uint8) for p in tier.pools] for tier in tree.tiers]
        self.readers = [[np.zeros(p.capacity + 1, np.int32) for p in tier.pools] for tier in tree.tiers]
        self.columns: dict[tuple[int, int, Node], npt.NDArray[np.int32]] = {}  # readers by (tier, group, node)
        self.pins: list[Counter[Node]] = [Counter() for _ in tree.tiers]
        self.held: Counter[Node] = Counter()
        self.below: list[Node] = []

    def run(self) -> None:
        tree = self.tree
        for namespace, root in tree.roots.items():
            assert root.attached and root.namespace == namespace, f"{namespace}: root is not hooked under its own name"
            assert root.bound or root.holders or root.top.children, f"{namespace}: empty and not forgotten"
            self._shape(root)
        promises = sum(len(flight.promises) for flight in self.steps.flights.values())
        assert tree.promises == promises, f"{promises} promises are in flight, {tree.promises} are counted"
        assert tree.nodes == len(self.below), f"{len(self.below)} nodes stand, {tree.nodes} are counted"
        for root in [*tree.roots.values(), *tree.detached_roots]:
            for holder in root.holders:
                if isinstance(holder, Lease):
                    self._lease(holder)
                else:
                    self._holder(holder)
        self._flights()
        self._saves()
        for transfer in [*self.loads.transfers.pending.values(), *self.loads.arrived.values()]:
            for g, (_, targets) in transfer.parts.items():
                self._own(transfer.tier, g, targets[targets != 0], FLIGHT, f"transfer {transfer.op}")
        for fetch in self.stored.fetches.values():
            for g, targets in fetch.targets.items():
                self._own(HOST, g, targets[targets != 0], FLIGHT, f"fetch {fetch.op}")
        for op, holder in self.stored.backups.items():
            assert holder in holder.root.holders, f"backup {op} holds nothing"
        self._quiet()
        self._readers()
        self._staying()
        self._pools()
        self._holds()
        self._queues()

    # ---- the tree

    def _shape(self, root: Root) -> None:
        stack = [root.top]
        while stack:
            node = stack.pop()
            if node is not root.top:
                self._node(node)
            assert (node.recent is None) == (not node.children), f"{self._at(node)}: no guess at a child"
            for key, child in node.children.items():
                assert child.parent is node and child.root is root, f"{self._at(child)}: not linked to its parent"
                assert child.start == node.end, f"{self._at(child)}: does not begin where its parent ends"
                assert child.edge[: self.tree.page_bytes] == key, f"{self._at(child)}: stands under a wrong key"
                self._closure(node, child)
                stack.append(child)

    def _closure(self, node: Node, child: Node) -> None:
        if not self.tree.closed or node.parent is None:
            return
        if child.copies[DEVICE].count:
            assert node.copies[DEVICE].count, f"{self._at(child)}: on the device, its parent is not"
        if self.tree.has_host and child.copies[HOST].count:
            whole = any(copy.count == node.n for copy in node.copies)
            assert whole, f"{self._at(child)}: has a host copy that cannot be reached"

    def _node(self, node: Node) -> None:
        tree, at = self.tree, self._at(node)
        self.below.append(node)
        assert node.n > 0 and len(node.edge) == node.n * tree.page_bytes, f"{at}: edge of a wrong length"
        assert bytes(node.edge[3::4]).isascii(), f"{at}: a negative token, which nobody can have known"
        if tree.closed:
            count = node.copies[DEVICE].count
            assert count in (0, node.n), f"{at}: {count} of {node.n} pages on the device"
            if tree.has_host and not count:
                assert node.copies[HOST].count in (0, node.n), f"{at}: partly on host and not on the device"
        something = False
        for t in range(len(tree.tiers)):
            copy = node.copies[t]
            stand = {depth for g in tree.slots for depth in copy.pages[g] or ()}
            assert stand == set(copy.seen or ()), f"{at}: snapshots at {stand}, known are {copy.seen}"
            something |= copy.count > 0 or (not tree.closed and any(copy.pages))
            for g in range(len(tree.groups)):
                pages = copy.pages[g]
                if g in tree.slots:
                    ids = np.array([*(pages or {}).values()], np.int32)
                    inside = all(node.start < depth <= node.end for depth in pages or ())
                    assert inside, f"{at}: a snapshot of {tree.groups[g].name} stands elsewhere"
                else:
                    ids = as_ids(pages or b"")
                    fine = len(ids) == copy.count if g in tree.closed else len(ids) <= node.n
                    assert fine, f"{at}: {len(ids)} ids of {tree.groups[g].name}"
                    assert g not in tree.closed or ids.all(), f"{at}: a hole in {tree.groups[g].name}"
                    ids = ids[ids != 0]
                self._own(t, g, ids, TREE, node)
        held = any(copy.holds for copy in node.copies)
        assert something or node.children or held, f"{at}: has nothing and is held by nobody"
        assert not node.promised or node.copies[DEVICE].holds, f"{at}: promised, and nobody holds it"
        if node.hashes is not None:
            assert len(node.hashes) % DIGEST_BYTES == 0 and count_of(node.hashes) <= node.n, f"{at}: too many hashes"
            self._hashes(node)

    def _hashes(self, node: Node) -> None:
        assert node.hashes is not None
        parent = node.parent
        if node.n > _HASHED_PAGES or parent is None or (parent.parent is not None and parent.hashes is None):
            return
        before = last_digest(parent.hashes) if parent.hashes else node.root.digest
        if parent.hashes and not is_hashed(parent):
            return
        known = count_of(node.hashes) * self.tree.page_bytes
        right = chain(before, bytes(node.edge[:known]), self.tree.page_bytes)
        assert right == node.hashes, f"{self._at(node)}: wrong hashes"

    @staticmethod
    def _at(node: Node) -> str:
        return f"node {node.seq} (pages {node.start} to {node.end} of {node.root.namespace})"

    # ---- what leases and transfers hold

    def _lease(self, lease: Lease) -> None:
        tree = self.tree
        name = "lease" + (" that has ended" if lease.ended else "")
        assert lease.ended or lease in self.leases, "a lease is held that nobody knows"
        owner = FLIGHT if lease.ended else LEASE
        for g, slot in lease.working.items():
            self._own(DEVICE, g, np.array([slot], np.int32), owner, name)
        for g, slot in lease.start_snapshot.items():
            self.readers[DEVICE][g][slot] += 1
        for g in tree.paged:
            self._own(DEVICE, g, as_ids(lease.private(g)), owner, name)
            columns, ids = lease.adopted(g)
            if lease.detached:
                np.add.at(self.readers[DEVICE][g], ids, 1)
            elif g in tree.sliding and lease.counted:
                self._reads(lease.node, DEVICE, g, lease.reading(g))
            if not lease.detached:
                self._follows(lease, g, columns, ids)
        if lease.detached:
            assert not lease.root.attached, "a lease is detached from a namespace that is there"
            return
        assert lease.node.end == lease.depth, f"lease at {lease.depth} is anchored at {self._at(lease.node)}"
        self.pins[DEVICE][lease.node] += 1

    def _follows(self, lease: Lease, g: int, columns: Ids, ids: Ids) -> None:
        if not len(columns):
            return
        theirs = np.zeros(int(columns[-1]) + 1, np.int32)
        for node, first, last in self.tree.cover(lease.node, 0, len(theirs)):
            pages = node.copies[DEVICE].pages[g]
            if pages:
                here = as_ids(pages)[first:last]
                theirs[node.start + first : node.start + first + len(here)] = here
        wrong = theirs[columns] != ids
        assert not wrong.any(), (
            f"lease: column {int(columns[wrong][0])} of {self.tree.groups[g].name} "
            f"is page {int(ids[wrong][0])}, the tree has {int(theirs[columns[wrong][0]])}"
        )

    def _holder(self, holder: PinHolder) -> None:
        for (tier, g), ids in holder.pages.items():
            if g in self.tree.slots or holder.detached:
                np.add.at(self.readers[tier][g], as_ids(ids), 1)
        if not holder.detached:
            for (tier, g), where in holder.spans.items() if holder.counted else ():
                self._reads(holder.node, tier, g, where)
            for tier in holder.tiers:
                self.pins[tier][holder.node] += 1
                self.held[holder.node] += tier == DEVICE

    def _reads(self, node: Node, tier: int, g: int, where: Ranges) -> None:
        for low, high in where:
            for at, first, last in self.tree.cover(node, low, high):
                self.columns.setdefault((tier, g, at), np.zeros(at.n, np.int32))[first:last] += 1

    def _quiet(self) -> None:
        """Those that are not counted as readers are those that will be."""
        roots = [*self.tree.roots.values(), *self.tree.detached_roots]
        uncounted = {holder for root in roots for holder in root.holders if not holder.counted}
        assert uncounted == set(self.tree.uncounted), "the readers that are not counted are not those that will be"
        assert not any(holder.detached for holder in uncounted), "a reader by page is not counted"

    def _readers(self) -> None:
        """Readers by column are what the nodes say; and the idle pages of sliding groups are those without a reader."""
        tree = self.tree
        for t in range(len(tree.tiers)):
            for g in tree.sliding:
                idle = 0
                for node in self.below:
                    copy = node.copies[t]
                    seen = self.columns.get((t, g, node), np.zeros(node.n, np.int32))
                    assert len(copy.reads[g] or b"") <= node.n, f"{self._at(node)}: readers behind its end"
                    kept = np.frombuffer(bytes(copy.reads[g] or b"").ljust(node.n, b"\0"), np.uint8).astype(np.int32)
                    for (group, column), more in (copy.reader_overflow or {}).items():
                        if group == g:
                            kept[column - node.start] += more
                    name = tree.groups[g].name
                    assert len(kept) == node.n and (kept == seen).all(), (
                        f"{self._at(node)}: {name} on {TIERS[t]} is read {seen.tolist()}, counted is {kept.tolist()}"
                    )
                    ids = as_ids(copy.pages[g] or b"")
                    unread = (ids != 0) & (kept[: len(ids)] == 0)
                    idle += int(np.count_nonzero(unread))
                    queue = tree.tiers[t].queues[g]
                    assert not unread.any() or copy.queued & sum(queue.bits), (
                        f"{self._at(node)}: has idle pages of {name} on {TIERS[t]}, is in no queue"
                    )
                pool = tree.tiers[t].pools[g]
                assert idle == pool.idle, f"{pool.name}: {idle} pages are idle, {pool.idle} are counted"

    def _staying(self) -> None:
        held: list[set[int]] = [set() for _ in self.tree.groups]
        for pin, holder in self.host_pins.live.items():
            assert holder in holder.root.holders and not holder.detached, f"stay {pin} holds nothing"
            for (_, g), raw in holder.pages.items():
                ids = as_ids(raw)
                held[g].update(ids.tolist())
                path = self.tree.cover(holder.node, 0, holder.node.end)
                there = {page for node, _, _ in path for page in self._ids(node, g)}
                assert there.issuperset(ids.tolist()), f"stay {pin}: a page of {self.tree.groups[g].name} is gone"
        for g, pages in enumerate(held):
            name, counted, most = self.tree.groups[g].name, self.host_pins.held[g], self.host_pins.limits[g]
            assert len(pages) == counted, f"{name}: {len(pages)} host pages stay, {counted} are counted"
            assert counted <= most, f"{name}: {counted} host pages stay, no more than {most} may"

    def _ids(self, node: Node, g: int) -> list[int]:
        """The host pages of a group at a node."""
        pages = node.copies[HOST].pages[g]
        return [*(pages or {}).values()] if g in self.tree.slots else as_ids(pages or b"").tolist()

    def _saves(self) -> None:
        marked: dict[Node, list[Transfer]] = {}
        for transfer in self.loads.transfers.pending.values():
            if transfer.tier != DEVICE and not transfer.detached:
                for node, _, _ in self.tree.cover(transfer.node, transfer.first, transfer.last):
                    marked.setdefault(node, []).append(transfer)
        for node in self.below:
            assert (node.saving or []) == marked.get(node, []), f"{self._at(node)}: its saves are not what it says"

    def _flights(self) -> None:
        for flight in self.steps.flights.values():
            for g, ids in flight.freed:
                self._own(DEVICE, g, as_ids(ids), FLIGHT, f"step {flight.step}")
            for snapshot in flight.snapshots:
                for g, slot in snapshot.slots.items():
                    self._own(DEVICE, g, np.array([slot], np.int32), FLIGHT, f"checkpoint of step {flight.step}")
            for lease in flight.ended:
                assert lease.ended and lease in lease.root.holders, f"step {flight.step} waits for a live lease"

    def _own(self, tier: int, g: int, ids: Ids, owner: int, who: str | Node) -> None:
        if not len(ids):
            return
        marks = self.owner[tier][g]
        if marks[ids].any() or len(set(ids.tolist())) < len(ids):
            name = f"{self.tree.groups[g].name} on {TIERS[tier]}"
            whose = self._at(who) if isinstance(who, Node) else who
            taken = ids[marks[ids] != 0]
            assert not len(taken), f"{name}: page {int(taken[0])} has two owners, one of them {whose}"
            raise AssertionError(f"{name}: {whose} has a page twice")
        marks[ids] = owner

    # ---- counts

    def _pools(self) -> None:
        for t in range(len(self.tree.tiers)):
            for g, pool in enumerate(self.tree.tiers[t].pools):
                owners = bytes(pool.owner)
                kept: npt.NDArray[np.uint8] = np.frombuffer(owners, np.uint8)
                seen = self.owner[t][g]
                readers = self.readers[t][g]
                counts = [owners.count(owner, 1) for owner in range(5)]
                detached_roots = kept == UNHOOKED
                if counts[UNHOOKED]:
                    assert not seen[detached_roots].any(), f"{pool.name}: an unhooked page is owned by somebody else"
                    assert readers[detached_roots].all(), f"{pool.name}: an unhooked page has no reader"
                assert kept[0] == 255, f"{pool.name}: somebody owns the null page"
                wrong = ((kept != seen) & ~detached_roots)[1:].nonzero()[0] + 1
                assert not len(wrong), (
                    f"{pool.name}: page {int(wrong[0])} is kept as owner {int(kept[wrong[0]])}, "
                    f"is really with {int(seen[wrong[0]])}"
                )
                counted = pool.readers
                wrong = (readers != counted).nonzero()[0]
                assert not len(wrong), (
                    f"{pool.name}: page {int(wrong[0])} has {int(readers[wrong[0]])} readers, "
                    f"{int(counted[wrong[0]])} are counted"
                )
                assert counts == pool.counts, f"{pool.name}: owners {counts}, counted {pool.counts}"
                assert sum(pool.counts) == pool.capacity and min(pool.counts) >= 0, f"{pool.name}: {pool.counts}"
                free = pool.free_ids()
                once = np.zeros(len(kept), np.bool_)
                once[free] = True
                assert np.count_nonzero(once) == len(free) == pool.free == counts[FREE], f"{pool.name}: free list"
                assert not kept[free].any(), f"{pool.name}: a page in the free list is owned"
                assert not readers[free].any(), f"{pool.name}: a page in the free list is read"
                if g in self.tree.slots:
                    idle = int(np.count_nonzero((kept == TREE) & (readers == 0)))
                    assert idle == pool.idle, f"{pool.name}: {idle} pages are idle, {pool.idle} are counted"

    def _holds(self) -> None:
        tree = self.tree
        for t in range(len(tree.tiers)):
            evictable = 0
            for node in reversed(self.below):
                copy = node.copies[t]
                children = [child.copies[t] for child in node.children.values()]
                holds = self.pins[t][node] + sum(1 for child in children if child.holds)
                assert self.held[node] == node.held, (
                    f"{self._at(node)}: {self.held[node]} pins, {node.held} are counted"
                )
                assert holds == copy.holds, f"{self._at(node)}: {holds} holds on {TIERS[t]}, {copy.holds} are counted"
                backed_children = sum(1 for child in children if child.count)
                assert backed_children == copy.backed_children, (
                    f"{self._at(node)}: {backed_children} children on {TIERS[t]}, {copy.backed_children} are counted"
                )
                evictable += 0 if holds else copy.count
            lru = tree.tiers[t].leaves
            assert evictable == lru.evictable, (
                f"{TIERS[t]}: {evictable} pages can be evicted, {lru.evictable} are counted"
            )

    def _queues(self) -> None:
        tree = self.tree
        for t in range(len(tree.tiers)):
            shelved = Counter(entry[2] for entry in tree.tiers[t].leaves.heap)
            for node in self.below:
                copy = node.copies[t]
                assert shelved[node] == (copy.queued & 1), f"{self._at(node)}: {shelved[node]} entries in its queue"
                if copy.count and not copy.holds and not copy.backed_children:
                    assert copy.queued & 1, f"{self._at(node)}: could be evicted from {TIERS[t]}, is in no queue"
        for g, t, queue in [(g, tier.index, queue) for tier in tree.tiers for g, queue in tier.queues.items()]:
            readers = tree.tiers[t].pools[g].readers
            standing = [Counter(entry[2] for entry in heap) for heap in queue.heaps]
            for node in self.below:
                copy = node.copies[t]
                for which, bit in enumerate(queue.bits):
                    inside = bool(copy.queued & bit)
                    assert standing[which][node] == inside, f"{self._at(node)}: queue {which} of group {g}"
                if g in tree.sliding:
                    continue
                ids = np.array([*(copy.pages[g] or {}).values()], np.int32)
                if ((ids != 0) & (readers[ids] == 0)).any():
                    assert copy.queued & sum(queue.bits), (
                        f"{self._at(node)}: has idle pages of {tree.groups[g].name} on {TIERS[t]}, is in no queue"
                    )
