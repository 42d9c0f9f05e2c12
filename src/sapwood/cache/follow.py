"""How a running lease keeps up with the tree: sliding windows, adopting what is new, going back to what is left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .flight import StepInFlight, note_promises
from .group import DEVICE
from .lease import Lease, hold
from .match import Matcher
from .node import Node
from .page_ids import HOLE, as_ids, has_hole, one, part, present, put, runs, runs_of
from .path import Path
from .pool import FLIGHT, LEASE
from .readers import read, unread, unread_one, use
from .tree import Tree


class Follower:
    def __init__(self, tree: Tree, matcher: Matcher) -> None:
        self.tree = tree
        self.matcher = matcher

    def slide_rows(self, leases: Sequence[Lease], positions: Sequence[int]) -> dict[str, tuple[list[int], list[int]]]:
        """Everything up to these positions is real: give up the pages of groups that slide which no row from there on
        needs. By group: which of `leases`, and the columns they gave up."""
        tree = self.tree
        gone = {}
        for g in tree.sliding:
            rows: list[int] = []
            columns: list[int] = []
            family = tree.families[g]
            ends = family.slid_ends(positions)
            for i, lease in enumerate(leases):
                low = lease.low[g]
                if ends is None:
                    spans, lease.low[g] = family.slid(low, positions[i])
                elif low < ends[i]:
                    spans, lease.low[g] = [(low, ends[i])], ends[i]
                else:
                    continue
                for first, last in spans:
                    self._give_up(lease, g, first, last)
                    rows += [i] * (last - first)
                    columns += range(first, last)
            if rows:
                gone[tree.groups[g].name] = (rows, columns)
        return gone

    def slide(self, lease: Lease, position: int) -> list[tuple[str, int, int]]:
        """`slide_rows` of one lease: which pages it gave up, as (group, first column, last column + 1)."""
        gone = self.slide_rows([lease], [position])
        return [(group, *run) for group, (_, columns) in gone.items() for run in runs(np.array(columns, np.int32))]

    def _give_up(self, lease: Lease, g: int, low: int, high: int) -> None:
        """The lease leaves its pages [low, high): it reads those of the tree no more, and its own are free."""
        tree, table = self.tree, lease.tables[g]
        split = min(max(lease.upto[g], low), high)
        if lease.own:
            for column in range(low, split):
                if (g, column) in lease.own:
                    self._give_up_duplicate(lease, g, column)
        shared = part(table, low, split)
        if split < high:
            tree.device.pools[g].release(present(part(table, split, high)), LEASE)
        put(table, low, HOLE * (high - low))
        if not shared:
            return
        if lease.detached:
            tree.device.pools[g].unread_unhooked(present(shared))
        elif lease.counted and split - low == 1:
            if shared != HOLE:
                unread_one(tree, lease.node, g, low)
        elif lease.counted and not has_hole(shared):
            unread(tree, lease.node, DEVICE, g, low, split)
        elif lease.counted:
            for first, last in runs_of(as_ids(shared)):
                unread(tree, lease.node, DEVICE, g, low + first, low + last)

    def _give_up_duplicate(self, lease: Lease, g: int, column: int) -> None:
        """The page of its own that a lease has beside the tree's. It is a reader of the tree's all the same."""
        page = lease.own.pop((g, column))
        self.tree.device.pools[g].release(one(page), LEASE)
        if lease.detached:
            put(lease.tables[g], column, HOLE)

    def refit(
        self, lease: Lease, path: Path, boundary: int, depth: int, length: int, held: StepInFlight | None
    ) -> None:
        """Let a lease go on from `boundary` of its own path (all of it on the device), following closed pages to
        `depth`. Its private pages are given back, after `held` if that still runs: nothing in them is needed."""
        tree = self.tree
        if held is not None:
            reading = {(DEVICE, g): lease.reading(g) for g in tree.sliding}
            held.holders.append(hold(tree, lease.node, (DEVICE,), (0, lease.depth), lease.seeds(), reading))
        node = lease.root.top
        if depth:
            last = next(n for n in reversed(path.nodes) if n.start < depth)
            node = last if last.end == depth else tree.split(last, depth - last.start)
        if lease.source is not None:
            lease.source.let_go(tree)
            lease.source, lease.copied = None, 0
        tree.pin(node, DEVICE)
        private = {g: lease.private(g) for g in tree.paged}
        for g in tree.closed:
            lease.upto[g] = depth
        for g in tree.sliding:
            self._reread(lease, node, g, boundary, length)
        for g, ids in private.items():
            if held is None:
                tree.device.pools[g].release(ids, LEASE)
            else:
                tree.device.pools[g].move(ids, LEASE, FLIGHT)
                held.freed.append((g, ids))
        lease.own.clear()
        self.release_snapshot(lease)
        tree.unpin(lease.node, DEVICE)
        lease.node, lease.depth, lease.boundary = node, depth, boundary
        nodes = tree.path_to(node).nodes
        for g in tree.closed:
            lease.tables[g] = bytearray().join([at.copies[DEVICE].pages[g] for at in nodes])
        lease.start = min(boundary * tree.page_size, length - 1)
        self.start_from_snapshot(lease, boundary)
        note_promises(tree, lease)

    def _reread(self, lease: Lease, node: Node, g: int, boundary: int, length: int) -> None:
        tree = self.tree
        before = lease.reading(g)
        spans = tree.families[g].columns(boundary, length)
        table = np.zeros(boundary, np.int32)
        for low, high in spans:
            for at, first, last in tree.cover(node, low, high):
                there = np.frombuffer(bytes(at.copies[DEVICE].pages[g]), np.int32)[first:last]
                table[at.start + first : at.start + last] = there
        lease.tables[g] = bytearray(table.tobytes())
        lease.upto[g] = boundary
        if lease.counted:
            for low, high in lease.reading(g):
                read(tree, node, DEVICE, g, low, high)
            for low, high in before:
                unread(tree, lease.node, DEVICE, g, low, high)
        lease.low[g] = spans[0][0] if spans else boundary
        if spans:
            use(tree, node, lease.low[g])

    def start_from_snapshot(self, lease: Lease, boundary: int) -> None:
        """Start the lease's state afresh from the snapshot at `boundary` (0: the zero state)."""
        tree = self.tree
        if not tree.slots:
            return
        lease.opened, lease.opened_at = False, 0
        lease.seed_depth = boundary
        if not boundary:
            return
        at = tree.node_at(lease.node, boundary).copies[DEVICE]
        tree.snapshots.use(at, boundary)
        for g in tree.slots:
            slot = lease.start_snapshot[g] = at.pages[g][boundary]
            tree.device.pools[g].read(slot)

    def release_snapshot(self, lease: Lease) -> None:
        """The lease stops reading the snapshot it was to start from."""
        seeds, lease.start_snapshot = lease.start_snapshot, {}
        if seeds:
            self.unread_slots(seeds, None if lease.detached else self.tree.node_at(lease.node, lease.seed_depth))

    def unread_slots(self, slots: dict[int, int], node: Node | None) -> None:
        """Stop reading snapshots that stand in `node`, or in none any more."""
        tree = self.tree
        for g, slot in slots.items():
            tree.device.pools[g].unread(slot)
            if node is not None:
                tree.device.queues[g].add(node, node.copies[DEVICE])

    def adopt(self, lease: Lease, tokens: bytes, position: int, held: StepInFlight | None) -> int:
        """Before the next chunk at `position`: take over what others have published since. What it lets go of waits for
        `held`, a doomed step that may touch it. Returns the new position."""
        tree = self.tree
        path = self._beyond(lease, tokens, position)
        if path is None:
            return position
        boundary, _ = self.matcher.boundary(path, lease.length)
        depth = path.device_closed(path.depth) if tree.closed else path.depth
        if min(boundary * tree.page_size, lease.length - 1) > position:
            self.refit(lease, path, boundary, max(depth, boundary), lease.length, held)
            return lease.start
        if tree.closed and depth > lease.depth:
            self._follow(lease, path, depth, held)
        return position

    def could_adopt(self, lease: Lease, tokens: bytes, position: int) -> bool:
        """Whether `adopt` would return more than `position`."""
        path = self._beyond(lease, tokens, position)
        if path is None:
            return False
        boundary, _ = self.matcher.boundary(path, lease.length)
        return min(boundary * self.tree.page_size, lease.length - 1) > position

    def _beyond(self, lease: Lease, tokens: bytes, position: int) -> Path | None:
        """What the device has of a lease's prompt, if that may be more than the lease has followed."""
        tree = self.tree
        if lease.detached or not lease.root.attached:
            return None
        if len(tokens) > 4 * lease.length:  # it has generated, and fell back into its prompt
            tokens = tokens[: 4 * lease.length]
        size = tree.page_bytes
        after = tokens[lease.depth * size : (lease.depth + 1) * size]
        if position >= lease.depth * tree.page_size and after not in lease.node.children:
            return None  # the tree goes no further than the lease does
        path = tree.walk(lease.root, tokens)
        path.tier = DEVICE
        return path

    def _follow(self, lease: Lease, path: Path, depth: int, held: StepInFlight | None) -> None:
        """Closed groups go further than the lease follows: give back its unwritten pages and follow."""
        tree = self.tree
        last = next(n for n in reversed(path.nodes) if n.start < depth)
        node = last if last.end == depth else tree.split(last, depth - last.start)
        tree.pin(node, DEVICE)
        tree.unpin(lease.node, DEVICE)
        nodes = tree.path_to(node).nodes
        for g in tree.closed:
            pool = tree.device.pools[g]
            spare = present(part(lease.tables[g], lease.upto[g], depth))
            if held is None:
                pool.release(spare, LEASE)
            else:
                pool.move(spare, LEASE, FLIGHT)
                held.freed.append((g, spare))
            lease.tables[g] = bytearray().join(
                [*(at.copies[DEVICE].pages[g] for at in nodes), part(lease.tables[g], depth)]
            )
            for (group, column), page in lease.own.items():
                if group == g:
                    put(lease.tables[g], column, one(page))
            lease.upto[g] = depth
        lease.node, lease.depth = node, depth
        note_promises(tree, lease)
