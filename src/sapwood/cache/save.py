"""Saves: which real pages host does not have, room for them there, and what is visible once they have arrived.

Most saves are short: a few nodes, some pages of each. So pages are gathered and landed as runs (a column and the bytes
of its ids), node by node, and owners and readers change once a group. numpy looks at a node only where something in it
is in the way: a hole, a page host has already, a promise, another save under way.
"""

from __future__ import annotations

import numpy as np

from .announce import tell_parts
from .group import DEVICE, HOST
from .lease import Holder, Span, hold
from .node import Copy, Node
from .pool import FLIGHT, TREE
from .readers import unread_columns
from .room import Room
from .runs import HOLE, Ranges, Run, joined, pages_in, ranges, runs, spread
from .transfer import Ledger, Operation, Parts, Transfer
from .tree import Cover, Tree, as_ids


class Saves:
    def __init__(self, tree: Tree, room: Room, ledger: Ledger) -> None:
        self.tree = tree
        self.room = room
        self.ledger = ledger
        host = [bool(group.host_pages) for group in tree.groups]
        whole = all(host[g] for g in tree.closed)  # closed groups are on host together or not at all
        self.closed = tree.closed if whole else []
        self.loose = [g for g in tree.loose if host[g]]
        self.slots = [g for g in tree.slots if host[g]]
        self.everything = all(host)

    def begin_save(self, span: Span) -> Operation | None:
        """Start to copy to host what of `span` is not there and not on its way. None: nothing to do, or no room."""
        tree, node = self.tree, span.node
        if not tree.has_host or not node.alive or not node.root.hooked:
            return None
        end = node.start + node.n
        path = tree.cover(node, span.first, span.last if span.last < end else end)
        sources: dict[tuple[int, int], bytes] = {}
        where: dict[int, Ranges] = {}
        need: dict[int, int] = {}
        first, last = end, 0
        for g, got in self._to_save(path).items():
            spots = where[g] = ranges(got)
            raw = sources[DEVICE, g] = joined(got)
            need[g] = len(raw) // 4
            if spots[0][0] < first:
                first = spots[0][0]
            if spots[-1][1] > last:
                last = spots[-1][1]
        if not need:
            return None
        holder = hold(
            tree, node, (DEVICE,), (first, last), sources, {(DEVICE, g): where[g] for g in self.loose if g in where}
        )
        if not self.room.has(HOST, need) and not self.make_room(node, (last,), need):
            holder.let_go(tree)
            self.ledger.counts["saves_skipped"] += 1
            return None
        parts: Parts = {}
        pools, n = tree.pools[HOST], last - first
        for (_, g), raw in sources.items():
            pair: tuple[bytes | bytearray, bytes | bytearray] = raw, pools[g].take(need[g], FLIGHT)
            if need[g] < n:
                pair = spread(where[g], pair[0], first, last), spread(where[g], pair[1], first, last)
            parts[g] = (np.frombuffer(pair[0], np.int32), np.frombuffer(pair[1], np.int32))
        node.tried = node.device.used
        operation, transfer = self.ledger.begin(HOST, node, first, last, parts, where, holder)
        for at, low, high in path:
            if at.start + low < last and at.start + high > first:
                at.saving = [*at.saving, transfer] if at.saving else [transfer]
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
        kept: dict[tuple[int, int], bytes] = {}
        spans = {(HOST, g): [span for at in boundaries for span in self._on_host(node, g, at)] for g in tree.loose}
        for g in tree.slots:
            slots = [
                slot.to_bytes(4, "little")
                for depth in boundaries
                if 0 < depth <= node.end
                and (slot := (tree.copy_in(tree.node_at(node, depth), HOST).pages[g] or {}).get(depth))
            ]
            if slots:
                kept[HOST, g] = b"".join(slots)
        return hold(tree, node, (HOST,), (0, max(boundaries)), kept, spans)

    def _on_host(self, node: Node, g: int, boundary: int) -> Ranges:
        """Where host has pages of those that a request beginning at `boundary` would read."""
        tree = self.tree
        return [
            (at.start + first + a, at.start + first + b)
            for low, end in tree.families[g].pages_read(boundary * tree.page_size)
            for at, first, high in tree.cover(node, low, end)
            if (pages := tree.copy_in(at, HOST).pages[g])
            for a, b in runs(as_ids(pages[4 * first : 4 * high]).nonzero()[0].astype(np.int32))
        ]

    def _to_save(self, path: Cover) -> dict[int, list[Run]]:
        """By group: the device pages of `path` that host does not have, root side first."""
        found: dict[int, list[Run]] = {}
        for node, low, high in reversed(path):
            start, there, busy = node.start, node.device.pages, node.promised or node.saving
            host: Copy = node.host  # type: ignore[assignment]
            kept = host.pages
            first = host.count if host.count > low else low
            if first < high:
                for g in self.closed:
                    if there[g]:
                        ids = there[g][4 * first : 4 * high]
                        got = self._unsaved(node, g, first, bytes(ids)) if busy else [(start + first, ids)]
                        found[g] = found[g] + got if g in found else got
            for g in self.loose:
                if there[g]:
                    ids = there[g][4 * low : 4 * high]
                    # Four zero bytes in a row are a hole, or two ids beside each other: only then look closer.
                    if busy or HOLE in ids or (kept[g] and kept[g].count(0, 4 * low, 4 * high) < len(ids)):
                        got = self._unsaved(node, g, low, bytes(ids))
                    else:
                        got = [(start + low, ids)]
                    found[g] = found[g] + got if g in found else got
            for g in self.slots:
                if there[g]:
                    for depth in sorted(there[g]):
                        if start + low < depth <= start + high and depth not in (kept[g] or ()):
                            if not (busy and self._under_way(node, g, depth)):
                                found.setdefault(g, []).append((depth - 1, there[g][depth].to_bytes(4, "little")))
        return {g: got for g, got in found.items() if got} if [] in found.values() else found

    @staticmethod
    def _under_way(node: Node, g: int, depth: int) -> bool:
        """Whether a save of the snapshot at `depth` in `node` is under way."""
        return node.saving is not None and any(save.covers(g, depth - 1) for save in node.saving)

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

    def land(self, transfer: Transfer, path: Cover) -> int:
        """What has come to host is the tree's now, or is freed where host has it already. `path` is what the transfer
        covers. Returns how many pages landed, of any group."""
        start = self._simple_start(transfer, path)
        if start is not None:
            return self._land_all(transfer, path, start)
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
        return pages_in(landed)

    def _simple_start(self, transfer: Transfer, path: Cover) -> int | None:
        """From where on every group of pages came whole, if all of it can be put where it belongs, as mostly: host has
        exactly what is before it in each node. Else None."""
        tree, came = self.tree, transfer.ranges
        start = -1
        for g in tree.paged:
            if g in came:
                ((low, high), *more) = came[g]
                if more or high != transfer.last or (low != start and start >= 0):
                    return None
                start = low
        if start < 0:
            return None
        closed = bool(tree.closed) and tree.closed[0] in came
        loose = [g for g in tree.loose if g in came]
        for node, low, high in path:
            host: Copy = node.host  # type: ignore[assignment]
            first = start - node.start
            if first < low:
                first = low
            if first < high:
                if closed and host.count != first:
                    return None
                for g in loose:
                    pages = host.pages[g]
                    if pages and pages.count(0, 4 * first, 4 * high) < 4 * (high - first):
                        return None
        return start

    def _land_all(self, transfer: Transfer, path: Cover, start: int) -> int:
        """`land` where nothing is in the way: pages from `start` on, and snapshots."""
        tree, base = self.tree, transfer.first
        pools, shelf, now = tree.pools[HOST], tree.shelves[HOST], tree.now
        raws = {g: targets.tobytes() for g, (_, targets) in transfer.parts.items()}
        closed = [(g, raws[g]) for g in tree.closed if g in raws]
        loose = [(g, raws[g], tree.queues[g, HOST]) for g in tree.loose if g in raws]
        landed = 0
        for node, low, high in path:
            host: Copy = node.host  # type: ignore[assignment]
            pages, column = host.pages, node.start
            first = start - column
            if first < low:
                first = low
            end = 4 * (column + high - base)
            if first < high:
                begin = 4 * (column + first - base)
                for g, raw in closed:
                    pages[g] = pages[g] + raw[begin:end] if first else raw[begin:end]
                if closed:
                    if not first:
                        node.parent.host.kids += 1  # type: ignore[union-attr]
                    host.count = high
                    if not host.holds:
                        shelf.evictable += high - first
                        if not host.kids:
                            tree.shelve(node, host, HOST)
                for g, raw, queue in loose:
                    if pages[g] is None:
                        pages[g] = bytearray(4 * node.n)
                    pages[g][4 * first : 4 * high] = raw[begin:end]
                    pools[g].idle += unread_columns(host, g, first, high)
                    queue.add(node, host)
            host.used = now
        for g in tree.slots:
            if g in raws:
                landed += pages_in(self.ledger.land_slot(transfer, g, transfer.ranges[g]))
        n = transfer.last - start
        for g, raw in closed:
            pools[g].hand(raw[-4 * n :], FLIGHT, TREE)
        for g, raw, _ in loose:
            pools[g].hand(raw[-4 * n :], FLIGHT, TREE)
        if tree.announcing and tree.told in raws:
            self._announce(transfer, path, start)
        return landed + n * (len(loose) + bool(closed))

    def _announce(self, transfer: Transfer, path: Cover, start: int) -> None:
        tree = self.tree
        if tree.told in tree.slots:
            self.ledger.announce(transfer.node, HOST, transfer.ranges[tree.told])
            return
        while path[-1][0].end <= start:
            path = path[:-1]
        node, low, high = path[-1]
        if node.start + low < start:
            path = [*path[:-1], (node, start - node.start, high)]
        tell_parts(tree, path, HOST)

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
