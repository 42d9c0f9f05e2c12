"""The life of a step: open while its plan runs, then committed or withdrawn. And the ends of leases, which may have to
wait for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .checkpoints import Checkpoints
from .flight import StepInFlight, unmark, withdraw
from .follow import Follower
from .group import DEVICE
from .lease import Lease, PageCopy, PinHolder, Span, hold
from .page_ids import PageIds, one, width
from .pool import FLIGHT, LEASE
from .publish import Publisher, Replaced
from .readers import unread
from .tree import Tree


class Commit(NamedTuple):
    """What became of a step: pages that are real now and could be saved, and table entries to change."""

    real: Sequence[Span]
    replaced: Sequence[Replaced]


_NO_NEWS = Commit((), ())


class StepCommits:
    def __init__(self, tree: Tree, follower: Follower, publisher: Publisher, checkpoints: Checkpoints) -> None:
        self.tree = tree
        self.follower = follower
        self.publisher = publisher
        self.checkpoints = checkpoints
        self.flights: dict[int, StepInFlight] = {}
        self.unsettled: dict[Lease, list[tuple[int, int]]] = {}  # duplicates of pages that may not be real yet
        self.doomed = 0  # steps up to this one count as failed whatever their events are: an earlier one has failed
        self.last = 0  # the newest step whose event has come
        self.newest = 0  # the newest step that is known here
        self.counts = {"steps": 0, "steps_failed": 0, "duplicates_freed": 0}

    def flight(self, step: int) -> StepInFlight:
        """Step `step`, which is being planned."""
        flight = self.flights.get(step)
        if flight is not None and step == self.newest and step > self.doomed:
            return flight
        if step <= max(self.last, self.doomed) or (self.flights and step < max(self.flights)):
            raise ValueError(f"step {step} cannot be planned any more: steps are planned in order, each once")
        return self._known(step)

    def in_flight(self, step: int | None) -> StepInFlight | None:
        """The step that still reads something, if it does: a plan without news for the cache is not known before."""
        return None if step is None or step <= self.last else self._known(step)

    def _known(self, step: int) -> StepInFlight:
        flight = self.flights.get(step)
        if flight is None:
            flight = self.flights[step] = StepInFlight(step)
            self.newest = max(self.newest, step)
        return flight

    def oldest(self, default: int) -> int:
        return min(self.flights, default=default)

    def opening(self, lease: Lease, step: int) -> list[PageCopy]:
        """The copies that must run before the next batch of a lease, which is that of `step`."""
        if lease.opened or not (self.tree.slots or lease.source):
            lease.opened = True
            return []
        return self.checkpoints.opening(lease, self.flight(step))

    # ---- pages and states that are handed to the tree

    def publish(self, lease: Lease, tokens: bytes, upto: int, step: int) -> None:
        """Hand the first `upto` pages of a lease to the tree, promised by `step`."""
        if lease.cuts:
            self.checkpoints.pass_cuts(lease, upto, self.flights)
        flight = self.flight(step)
        self.publisher.publish(lease, tokens, 0, upto, flight, self.oldest(step) if lease.deps else step)

    def publish_rows(self, leases: Sequence[Lease], pages: Sequence[bytes], step: int | None) -> None:
        """Hand one more page of each lease to the tree, real already; what `step` promised is real before it."""
        if step is not None:
            self.computed(step)
        for lease, duplicates in self.publisher.publish_rows(leases, pages):
            self.remember_duplicates(lease, duplicates)

    def publish_rest(self, lease: Lease, fill: bytes, computed: int, reading: int | None) -> None:
        """A lease ends: hand over its last computed pages, whose tokens are `fill`, and its state."""
        tree = self.tree
        if lease.writes and not lease.detached and self.in_flight(reading) is None:
            if fill:
                upto = lease.depth + len(fill) // tree.page_bytes
                self.publisher.publish(lease, fill, lease.depth, upto, None, 0)
            if tree.slots:
                self.checkpoints.publish_state(lease, computed)
        elif tree.slots:
            self.checkpoints.counts["states_dropped"] += 1

    # ---- events

    def commit(self, step: int, reading: int | None) -> Commit:
        publisher, flights = self.publisher, self.flights
        if flights or step <= self.last:
            self._in_order(step)
        self.last = step
        self.tree.clock.step_over()
        flight = flights.pop(step, None) if flights else None
        self.counts["steps" if step > self.doomed else "steps_failed"] += 1
        if flight is None and not (self.unsettled or publisher.real or publisher.replaced):
            return _NO_NEWS
        if flight is not None:
            if step > self.doomed:
                if flight.promises:
                    self._keep_promises(flight)
                for snapshot in flight.snapshots:
                    self.checkpoints.land(snapshot)
            self._over(flight)
        if self.unsettled:
            unsettled, self.unsettled = self.unsettled, {}
            held = self.in_flight(reading)
            for lease, duplicates in unsettled.items():
                left = self.publisher.settle(lease, duplicates, held)
                if left:
                    self.unsettled[lease] = left
        real, replaced = self.publisher.take()
        self.counts["duplicates_freed"] += len(replaced)
        return Commit(real, replaced)

    def computed(self, step: int) -> None:
        """Step `step` is about to be committed: what it promised is real from now on."""
        if self.flights or step <= self.last:
            self._in_order(step)
        flight = self.flights.get(step)
        if flight is not None and flight.promises and step > self.doomed:
            self._keep_promises(flight)

    def _keep_promises(self, flight: StepInFlight) -> None:
        tree, publisher = self.tree, self.publisher
        promises = flight.promises
        flight.promises = []
        for promise in promises:
            if not promise.lease.root.attached:
                continue
            unmark(tree, promise)
            publisher.became_real(promise.lease, promise.node, promise.first, promise.last, promise.fills)
        tree.promises -= len(promises)
        for promise in promises:
            if promise.duplicates:
                self.remember_duplicates(promise.lease, promise.duplicates)

    def remember_duplicates(self, lease: Lease, duplicates: list[tuple[int, int]]) -> None:
        """To be given up when the tree's pages are real, or with the lease."""
        if not lease.ended:
            self.unsettled.setdefault(lease, []).extend(duplicates)

    def _in_order(self, step: int) -> None:
        if step <= self.last:
            raise ValueError(f"the event of step {step} has come already")
        if self.flights and min(self.flights) < step:
            raise ValueError(f"the event of step {step} comes before that of step {min(self.flights)}")

    def failed(self, step: int, newest: int) -> list[Lease]:
        """Withdraw what `step` and all later steps up to `newest` promised. Returns the leases that lost something."""
        tree = self.tree
        self._in_order(step)
        self.last = step
        tree.clock.step_over()
        self.counts["steps_failed"] += 1
        if step <= self.doomed:
            self._over(self.flights.pop(step, None))
            return []
        self.doomed = max(step, newest)
        held = self._known(newest) if newest > step else None
        gone = self.flights.pop(step, None)
        later = [flight for number, flight in sorted(self.flights.items()) if number > step]
        doomed = ([gone] if gone is not None else []) + later
        promises = [p for flight in doomed for p in flight.promises if p.lease.root.attached]
        for promise in promises:
            tree.pin(promise.node, DEVICE)
            unmark(tree, promise)
        fallen = self._fall_back_all(step, held)
        freed: list[tuple[int, PageIds]] = held.freed if held is not None else []
        for promise in reversed(promises):
            withdraw(tree, promise, freed)
        for flight in doomed:
            for snapshot in flight.snapshots:
                freed += [(g, one(slot)) for g, slot in snapshot.slots.items()]
            tree.promises -= len(flight.promises)
            flight.promises, flight.snapshots = [], []
        for promise in promises:
            tree.unpin(promise.node, DEVICE)
        self._over(gone)
        if held is None:
            self._free(freed)
        return fallen

    def _over(self, flight: StepInFlight | None) -> None:
        """Its event has come: nothing it touched is touched any more."""
        if flight is None:
            return
        for lease in flight.ended:
            self._drop(lease, FLIGHT)
        for lease in flight.opened:
            if lease.opened_at == flight.step:
                self.follower.release_snapshot(lease)
        for holder in flight.holders:
            holder.let_go(self.tree)
        self._free(flight.freed)

    def _free(self, freed: list[tuple[int, PageIds]]) -> None:
        for g, ids in freed:
            self.tree.device.pools[g].release(ids, FLIGHT)

    # ---- going back

    def _fall_back_all(self, step: int, held: StepInFlight | None) -> list[Lease]:
        fallen = []
        tree = self.tree
        roots = [*tree.roots.values(), *tree.detached_roots]
        for lease in [holder for root in roots for holder in root.holders if isinstance(holder, Lease)]:
            lost = [page for number, page in lease.deps if number >= step]
            if lease.copied_at >= step:  # the copy on write it began with did not happen
                lease.copied_at = lease.copied = 0
                lease.start = lease.boundary * tree.page_size
                lease.uncopied = True
            if lost:
                lease.deps = [dep for dep in lease.deps if dep[0] < step]
                self.fall_back(lease, min(lost), held)
                if not lease.ended:
                    fallen.append(lease)
        return fallen

    def fall_back(self, lease: Lease, page: int, held: StepInFlight | None) -> None:
        """The lease keeps its pages below `page`. What it lets go of stays in flight while a step may touch it."""
        tree = self.tree
        owner = FLIGHT if lease.ended else LEASE
        freed = [(g, lease.private(g, page)) for g in tree.paged]
        for g, ids in freed:
            tree.device.pools[g].move(ids, owner, FLIGHT)
        if lease.detached:
            adopted = {g: lease.adopted(g) for g in tree.paged}
            gone = {(DEVICE, g): ids[columns >= page].tobytes() for g, (columns, ids) in adopted.items()}
            self._stop_reading(lease, gone, held)
        else:
            self._move_anchor(lease, page, held)
        for key in [key for key in lease.own if key[1] >= page]:
            del lease.own[key]
        for g in tree.paged:
            del lease.tables[g][4 * page :]
            lease.upto[g] = min(lease.upto[g], page)
            lease.low[g] = min(lease.low[g], page)
        if held is not None:
            held.freed += freed
        else:
            self._free(freed)

    def _stop_reading(self, lease: Lease, pages: dict[tuple[int, int], bytes], held: StepInFlight | None) -> None:
        """A detached lease reads these pages no more; a doomed step may, and keeps them until it is over."""
        holder = PinHolder(self.tree, lease.root.top, (), (0, 0), pages)
        holder.detached = True
        if held is None:
            holder.let_go(self.tree)
        else:
            held.holders.append(holder)

    def _move_anchor(self, lease: Lease, page: int, held: StepInFlight | None) -> None:
        tree = self.tree
        old = lease.node
        reading = {
            (DEVICE, g): [(max(low, page), high) for low, high in lease.reading(g) if high > page] for g in tree.sliding
        }
        seeded = lease.seed_depth > page  # it began on pages that were promised, and are withdrawn now
        if held is not None:
            seeds = lease.seeds() if seeded else {}
            held.holders.append(hold(tree, old, (DEVICE,), (page, lease.depth), seeds, reading))
        if lease.counted:
            for (_, g), spans in reading.items():
                for low, high in spans:
                    unread(tree, old, DEVICE, g, low, high)
        if seeded:  # while its anchor still stands below the snapshot
            self.follower.release_snapshot(lease)
        if lease.depth > page:
            node = tree.node_ending(old, page) if page else lease.root.top
            tree.pin(node, DEVICE)
            tree.unpin(old, DEVICE)
            lease.node, lease.depth = node, page

    def rewind(self, lease: Lease, position: int) -> int:
        """Where the lease goes on after a failed step: `position` had been computed before it. Families that cannot
        undo go back to a snapshot."""
        tree = self.tree
        size = tree.page_size
        have = min((width(lease.tables[g]) for g in tree.paged), default=-(-position // size))
        position = min(position, have * size)
        if lease.uncopied:
            position, lease.uncopied = min(position, lease.start), False
        if all(family.undoable for family in tree.families) and self._reaches_back(lease, position):
            return position
        held = self.flights[max(self.flights)] if self.flights else None
        if lease.detached:
            self.fall_back(lease, 0, held)
            self._stop_reading(lease, lease.seeds(), held)
            lease.start_snapshot = {}
            self.follower.start_from_snapshot(lease, 0)
            lease.start = lease.boundary = 0
            return 0
        path = tree.path_to(lease.node)
        path.tier = DEVICE
        depth, path.depth = path.depth, min(path.depth, position // size)
        path.nodes = [node for node in path.nodes if node.start < path.depth]
        boundary, _ = self.follower.matcher.boundary(path, position + 1)
        self.follower.refit(lease, tree.path_to(lease.node), boundary, depth, position + 1, held)
        return lease.start

    def _reaches_back(self, lease: Lease, position: int) -> bool:
        """Whether the lease still has what a row from `position` on reads. One that began on promised pages has not
        got those before them."""
        for g in self.tree.sliding:
            table = lease.table(g)
            for low, high in self.tree.families[g].pages_read(position):
                if high > len(table) or not table[low:high].all():
                    return False
        return True

    # ---- ends

    def end(self, lease: Lease, reading: int | None) -> None:
        """Drop a lease; if step `reading` still runs one of its rows, what it touches waits for that."""
        tree = self.tree
        lease.ended = True
        self.unsettled.pop(lease, None)
        if lease.cuts:
            self.checkpoints.stop_making(lease)
        if lease.waits:
            for transfer in lease.waits:
                transfer.waiters.remove(lease)
            lease.waits = []
        steps = [step for step, _ in lease.deps if step in self.flights] if self.flights else []
        if reading is not None or self.doomed > self.last:
            for step in (reading, self.doomed):  # a doomed step still writes what it was given
                running = self.in_flight(step)
                if running is not None:
                    steps.append(running.step)
        if not steps:
            self._drop(lease, LEASE)
            return
        for g in tree.paged:
            tree.device.pools[g].move(lease.private(g), LEASE, FLIGHT)
        for g, slot in lease.working.items():
            tree.device.pools[g].move(one(slot), LEASE, FLIGHT)
        self.flights[max(steps)].ended.append(lease)

    def _drop(self, lease: Lease, owner: int) -> None:
        tree = self.tree
        for g in tree.paged:
            tree.device.pools[g].release(lease.private(g), owner)
        if lease.working:
            for g, slot in lease.working.items():
                tree.device.pools[g].release(one(slot), owner)
        if lease.start_snapshot:
            self.follower.release_snapshot(lease)
        if lease.source is not None:
            lease.source.let_go(tree)
        if lease.detached:
            for g in tree.paged:
                tree.device.pools[g].unread_unhooked(lease.adopted(g)[1].tobytes())
        elif lease.counted:
            for g in tree.sliding:
                for low, high in lease.reading(g):
                    unread(tree, lease.node, DEVICE, g, low, high)
        else:
            del tree.uncounted[lease]
        del lease.root.holders[lease]
        if not lease.detached:
            tree.unpin(lease.node, DEVICE)
        if lease.detached or not lease.root.bound:
            tree.forget_if_empty(lease.root)
