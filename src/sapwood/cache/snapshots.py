"""Snapshots of recurrent state: what a row copies before it starts, and the checkpoints it leaves behind.

A working slot is never shared. A checkpoint is a copy into a new slot, promised until its step is done; the one before
it goes only then.
"""

from __future__ import annotations

from .flight import Flight, Snapshot
from .follow import Follower
from .group import DEVICE
from .lease import Holder, Lease, PageCopy
from .node import Node
from .pool import FLIGHT, LEASE
from .publish import Publisher
from .room import Room
from .transfer import put_slot
from .tree import Tree

_new = tuple.__new__  # a NamedTuple in a third of the time


class Snapshots:
    def __init__(self, tree: Tree, room: Room, follower: Follower, publisher: Publisher) -> None:
        self.tree = tree
        self.room = room
        self.follower = follower
        self.publisher = publisher
        self.counts = {
            "checkpoints": 0,
            "checkpoints_skipped": 0,
            "snapshots_lost": 0,
            "states_published": 0,
            "states_dropped": 0,
        }

    def opening(self, lease: Lease, flight: Flight) -> list[PageCopy]:
        """The copies that must run before the lease's next batch. Their sources are held until the step is done."""
        tree = self.tree
        if lease.opened:
            return []
        lease.opened = True
        copies = [
            PageCopy(tree.groups[g].name, lease.seed.get(g, 0), lease.working[g], tree.page_size, "before")
            for g in tree.slots
        ]
        if lease.seed:
            ids = {(DEVICE, g): slot.to_bytes(4, "little") for g, slot in lease.seed.items()}
            if not lease.detached:
                node = lease.seed_node
                assert node is not None
                flight.holders.append(Holder(tree, node, (DEVICE,), (node.end - 1, node.end), ids))
                lease.seed = {}
        if lease.source is not None:
            for (_, g), page in lease.source.pages.items():
                if lease.upto[g] > lease.boundary:
                    continue  # the tree has this page by now
                source, target = int.from_bytes(page, "little"), int(lease.table(g)[lease.boundary])
                copies.append(PageCopy(tree.groups[g].name, source, target, lease.copied, "before"))
            flight.holders.append(lease.source)
            lease.source, lease.copied_at = None, flight.step
        return copies

    def checkpoint(self, lease: Lease, page: int, flight: Flight, rolling: bool) -> list[PageCopy]:
        """Copy the working slots, which will stand at the end of `page` pages after the step, into new slots."""
        tree = self.tree
        if not tree.slots or lease.detached or not lease.writes:
            self._skip_cut(lease, page)
            return []
        need = dict.fromkeys(tree.slots, 1)
        if not self.room.has(DEVICE, need) and not self._make_room(lease, need):
            self.counts["checkpoints_skipped"] += 1
            self._skip_cut(lease, page)
            return []
        slots, copies = {}, []
        for g in tree.slots:
            slot = slots[g] = tree.pools[DEVICE][g].allocate_one(FLIGHT)
            copies.append(_new(PageCopy, (tree.groups[g].name, lease.working[g], slot, tree.page_size, "after")))
        flight.snapshots.append(Snapshot(lease, page, slots, rolling))
        self.counts["checkpoints"] += 1
        return copies

    def _make_room(self, lease: Lease, need: dict[int, int]) -> bool:
        """Evict for a checkpoint, but never the last one to make the next: that one may fail."""
        tree = self.tree
        place = self._rolling_node(lease)
        old = {} if place is None else {g: place.device.pages[g] for g in tree.slots if place.device.pages[g]}
        for g, slot in old.items():
            tree.pools[DEVICE][g].read_one(slot)
        fits = self.room.made(DEVICE, need)
        self.follower.unseed(old, place)
        return fits

    def _rolling_node(self, lease: Lease) -> Node | None:
        """Where the checkpoint stands that the next one replaces, if it is still there."""
        if not lease.rolling or lease.rolling > lease.depth:
            return None
        at: Node | None = lease.node
        while at is not None and at.start >= lease.rolling:
            at = at.parent
        return at if at is not None and at.start + at.n == lease.rolling else None

    def land(self, snapshot: Snapshot) -> None:
        """The step is done: its checkpoint is real, if the pages below it were published."""
        tree, lease = self.tree, snapshot.lease
        if lease.detached or lease.depth < snapshot.page or lease not in lease.root.holders:
            for g, slot in snapshot.slots.items():
                tree.pools[DEVICE][g].release_one(slot, FLIGHT)
            self.counts["snapshots_lost"] += 1
            self._skip_cut(lease, snapshot.page)
            return
        page, node = snapshot.page, lease.node
        old = self._rolling_node(lease) if snapshot.rolling and lease.rolling != page else None
        if node.start + node.n != page:
            node = tree.node_ending(node, page)
        kept = [g for g, slot in snapshot.slots.items() if put_slot(tree, node, DEVICE, g, slot)]
        if tree.has_host or tree.told in kept:
            self.publisher.snapshot_is_real(lease, node, kept, snapshot.rolling)
        if lease.cuts:
            self._skip_cut(lease, page)
        if snapshot.rolling:
            lease.rolling = page
            if old is not None:
                for g in tree.slots:
                    slot = old.device.pages[g]
                    if slot and not tree.pools[DEVICE][g].read_by(slot):
                        tree.drop_slot(old, DEVICE, g)

    def pass_cuts(self, lease: Lease, upto: int, flights: dict[int, Flight]) -> None:
        """A chunk goes on beyond a cut: unless a checkpoint there is under way, there will be none."""
        passed = [cut for cut in lease.cuts if cut < upto]
        if passed:
            coming = {s.page for flight in flights.values() for s in flight.snapshots if s.lease is lease}
            for cut in passed:
                if cut not in coming:
                    self._skip_cut(lease, cut)

    def _skip_cut(self, lease: Lease, cut: int) -> None:
        """Nobody need wait for a snapshot at `cut` any more."""
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
            tree.pools[DEVICE][g].move_one(slot, LEASE, FLIGHT)
            del lease.working[g]
            if put_slot(tree, node, DEVICE, g, slot):
                kept.append(g)
        self.counts["states_published"] += 1
        self.publisher.snapshot_is_real(lease, node, kept, False)
