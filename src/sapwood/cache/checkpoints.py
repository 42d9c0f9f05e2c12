"""Snapshots of recurrent state: what a row copies before it starts, and the checkpoints it leaves behind.

A working slot is never shared. A checkpoint is a copy into a new slot, promised until its step is done; the one before
it goes only then.
"""

from __future__ import annotations

from .flight import Snapshot, StepInFlight
from .follow import Follower
from .group import DEVICE
from .lease import Lease, PageCopy
from .page_ids import first_of, one, page_at
from .pool import FLIGHT, LEASE
from .publish import Publisher
from .tree import Tree


class Checkpoints:
    def __init__(self, tree: Tree, follower: Follower, publisher: Publisher) -> None:
        self.tree = tree
        self.follower = follower
        self.publisher = publisher
        self.one = dict.fromkeys(tree.slots, 1)
        self.counts = {
            "checkpoints": 0,
            "checkpoints_skipped": 0,
            "snapshots_lost": 0,
            "states_published": 0,
            "states_dropped": 0,
        }

    def opening(self, lease: Lease, flight: StepInFlight) -> list[PageCopy]:
        """The copies that must run before the lease's next batch. Their sources are read until the step is over."""
        tree = self.tree
        lease.opened = True
        copies = []
        for g in tree.slots:
            source, target = lease.start_snapshot.get(g, 0), lease.working[g]
            copies.append(PageCopy(tree.groups[g].name, source, target, tree.page_size, "before"))
        if lease.start_snapshot:
            lease.opened_at = flight.step
            flight.opened.append(lease)
        if lease.source is not None:
            for (_, g), page in lease.source.pages.items():
                if lease.upto[g] > lease.boundary:
                    continue  # the tree has this page by now
                source, target = first_of(page), page_at(lease.tables[g], lease.boundary)
                copies.append(PageCopy(tree.groups[g].name, source, target, lease.copied, "before"))
            flight.holders.append(lease.source)
            lease.source, lease.copied_at = None, flight.step
        return copies

    def checkpoint(self, lease: Lease, page: int, flight: StepInFlight, rolling: bool) -> list[PageCopy]:
        """Copy the working slots, which will stand at the end of `page` pages after the step, into new slots."""
        tree = self.tree
        if not tree.slots or lease.detached or not lease.writes:
            self._skip_cut(lease, page)
            return []
        if not tree.device.has_free(self.one) and not self._make_room(lease):
            self.counts["checkpoints_skipped"] += 1
            self._skip_cut(lease, page)
            return []
        slots, copies = {}, []
        for g in tree.slots:
            slot = slots[g] = first_of(tree.device.pools[g].allocate(1, FLIGHT))
            copies.append(PageCopy(tree.groups[g].name, lease.working[g], slot, tree.page_size, "after"))
        flight.snapshots.append(Snapshot(lease, page, slots, rolling))
        self.counts["checkpoints"] += 1
        return copies

    def _make_room(self, lease: Lease) -> bool:
        """Evict for a checkpoint, but never the last one to make the next: that one may fail."""
        tree = self.tree
        old = self._rolling(lease)
        for g, slot in old.items():
            tree.device.pools[g].read(slot)
        fits = tree.device.try_make(self.one)
        if old:
            self.follower.unread_slots(old, tree.node_at(lease.node, lease.rolling))
        return fits

    def _rolling(self, lease: Lease) -> dict[int, int]:
        """By group: the checkpoint that the next one replaces, if it is still there."""
        depth = lease.rolling
        if not depth or depth > lease.depth:
            return {}
        pages = self.tree.node_at(lease.node, depth).copies[DEVICE].pages
        return {g: pages[g][depth] for g in self.tree.slots if depth in (pages[g] or ())}

    def land(self, snapshot: Snapshot) -> None:
        """The step is done: its checkpoint is real, if the pages below it were published."""
        tree, lease = self.tree, snapshot.lease
        if lease.detached or lease.depth < snapshot.page or lease not in lease.root.holders:
            for g, slot in snapshot.slots.items():
                tree.device.pools[g].release(one(slot), FLIGHT)
            self.counts["snapshots_lost"] += 1
            self._skip_cut(lease, snapshot.page)
            return
        page, node = snapshot.page, lease.node
        if node.start >= page:
            node = tree.node_at(node, page)
        kept = [g for g, slot in snapshot.slots.items() if tree.snapshots.put(node, DEVICE, g, page, slot)]
        if tree.has_host or tree.announced_group in kept:
            self.publisher.snapshot_is_real(lease, node, page, kept, snapshot.rolling)
        if lease.cuts:
            self._skip_cut(lease, page)
        if snapshot.rolling:
            if lease.rolling and lease.rolling != page:
                for g, slot in self._rolling(lease).items():
                    if not tree.device.pools[g].readers[slot]:
                        tree.snapshots.drop(tree.node_at(lease.node, lease.rolling), DEVICE, g, lease.rolling)
            lease.rolling = page if kept else 0  # a snapshot that stands there may be another lease's

    def pass_cuts(self, lease: Lease, upto: int, flights: dict[int, StepInFlight]) -> None:
        """A chunk goes on beyond a cut: unless a checkpoint there is under way, there will be none."""
        passed = [cut for cut in lease.cuts if cut < upto]
        if passed:
            coming = {s.page for flight in flights.values() for s in flight.snapshots if s.lease is lease}
            for cut in passed:
                if cut not in coming:
                    self._skip_cut(lease, cut)

    def _skip_cut(self, lease: Lease, cut: int) -> None:
        """There will be no snapshot of this lease at `cut`: requests need not wait for one."""
        if cut not in lease.cuts:
            return
        makers = lease.root.makers
        size = self.tree.page_bytes
        page = lease.tokens[(cut - 1) * size : cut * size]
        if lease in makers.get(cut, {}).get(page, ()):
            makers[cut][page].remove(lease)
            if not makers[cut][page]:
                del makers[cut][page]
                if not makers[cut]:
                    del makers[cut]
        lease.cuts = tuple(other for other in lease.cuts if other != cut)
        if not lease.cuts:
            lease.tokens = b""

    def stop_making(self, lease: Lease) -> None:
        for cut in lease.cuts:
            self._skip_cut(lease, cut)

    def publish_state(self, lease: Lease, computed: int) -> None:
        """A request ends: its working slots become a snapshot, if they stand exactly at a published page end."""
        tree = self.tree
        page, rest = divmod(computed, tree.page_size)
        if rest or not page or lease.detached or lease.depth != page or lease.node.end != page or not lease.opened:
            self.counts["states_dropped"] += 1
            return
        node = lease.node
        kept = []
        for g, slot in list(lease.working.items()):
            tree.device.pools[g].move(one(slot), LEASE, FLIGHT)
            del lease.working[g]
            if tree.snapshots.put(node, DEVICE, g, page, slot):
                kept.append(g)
        self.counts["states_published"] += 1
        self.publisher.snapshot_is_real(lease, node, page, kept, False)
