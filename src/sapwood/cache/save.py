"""Saves: which real pages host does not have, room for them there, and what is visible once they have arrived.

Most saves are short: a few nodes, some pages of each. So pages are gathered and landed as runs (a column and the bytes
of its ids), node by node, and owners and readers change once a group. numpy looks at a node only where something in it
is in the way: a hole, a page host has already, a promise, another save under way.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .begins import NEAR, WINDOW, reach, worth
from .group import DEVICE, HOST
from .lease import PinHolder, Span, hold
from .node import Node
from .page_ids import HOLE, Ranges, runs_of, spread
from .pool import FLIGHT
from .publish import Publisher
from .room import Room
from .transfer import Operation, Parts, PendingTransfers, Transfer, host_runs
from .tree import Cover, Tree

frombuffer = np.frombuffer
_raw = Struct("<i").pack
_INT32 = np.dtype(np.int32)  # numpy looks a type up, which takes as long as all the rest of `frombuffer`


class Wanted(NamedTuple):
    """Device pages to be saved: by group where they stand and which they are, how many, and in which columns."""

    where: dict[int, Ranges]
    sources: dict[tuple[int, int], bytes]
    need: dict[int, int]
    first: int
    last: int


class Saves:
    def __init__(self, tree: Tree, room: Room, ledger: PendingTransfers, publisher: Publisher) -> None:
        self.tree = tree
        self.room = room
        self.ledger = ledger
        self.publisher = publisher
        host = [bool(group.host_pages) for group in tree.groups]
        whole = all(host[g] for g in tree.closed)  # closed groups are on host together or not at all
        self.closed = tree.closed if whole else []
        self.sliding = [g for g in tree.sliding if host[g]]
        self.slots = [g for g in tree.slots if host[g]]
        self.everything = all(host)

    def begin_save(self, span: Span) -> Operation | None:
        """Start to copy to host what of `span` is not there and not on its way. None: nothing to do, no room, or (then
        the next step offers it again) pages above it are only promised."""
        tree, node = self.tree, span.node
        if not tree.has_host or node.parent is None or not node.root.attached:
            return None
        end = node.start + node.n
        last = min(span.last, end)
        path = tree.cover(node, span.first, last)
        if tree.promises and self._below_promises(path[-1][0] if path else node):
            self.publisher.real.append(span)  # to be offered again with the next step: it will be known then
            return None
        left_out = 0
        for least in (NEAR, WINDOW):  # a small host may have room for what is worth most
            wanted = self._wanted(span, path, last, least)
            if wanted is None:
                count = 0
                break
            count = sum(wanted.need.values())
            left_out = max(left_out, count)
            # Of a node behind them with nothing but host pages, nothing is left when these make room.
            node = tree.node_at(span.node, wanted.last)
            if self._fits(node, wanted):
                break
        else:
            self.ledger.counts["saves_skipped"] += 1
            wanted, count = None, 0
        self.ledger.counts["pages_skipped"] += left_out - count
        if wanted is None:
            return None
        where, sources, need, first, last = wanted
        spans = {(DEVICE, g): where[g] for g in self.sliding if g in where}
        pools = tree.tiers[HOST].pools
        parts: Parts = {}
        came = {}
        source: bytes | bytearray
        target: bytes | bytearray
        for (_, g), source in sources.items():
            target = came[g] = pools[g].allocate(need[g], FLIGHT)
            if need[g] < last - first:
                source, target = spread(where[g], source, first, last), spread(where[g], target, first, last)
            parts[g] = frombuffer(source, _INT32), frombuffer(target, _INT32)
        node.tried = node.copies[DEVICE].used
        transfer = Transfer(
            tree, self.ledger.number(), HOST, node, (first, last), parts, where, came, (DEVICE,), sources, spans
        )
        for at, _, _ in tree.cover(node, first, last):
            at.saving = [*at.saving, transfer] if at.saving else [transfer]
        return self.ledger.begin(transfer)

    def _wanted(self, span: Span, path: Cover, last: int, least: int) -> Wanted | None:
        """What of a span, whose nodes are `path`, host does not have; of windows, what is worth `least` or more."""
        where: dict[int, Ranges] = {}
        sources: dict[tuple[int, int], bytes] = {}
        for at, low, high in reversed(path) if len(path) > 1 else path:
            self._to_save(at, low, high, where, sources)
        if where or self._closed_on_host(span.node, last):
            for g in self.sliding:
                self._to_save_of_windows(g, span, last, least, where, sources)
        if not where:
            return None
        need, first, end = {}, last, 0
        for g, spots in where.items():
            low, high = spots[0][0], spots[-1][1]
            if low < first:
                first = low
            if high > end:
                end = high
            need[g] = len(sources[DEVICE, g]) // 4
        return Wanted(where, sources, need, first, end)

    def _fits(self, node: Node, wanted: Wanted) -> bool:
        """Whether host has room for it, or can make some."""
        if self.room.has(HOST, wanted.need):
            return True
        tree, where = self.tree, wanted.where
        spans = {(DEVICE, g): where[g] for g in self.sliding if g in where}
        guard = hold(tree, node, (DEVICE,), (wanted.first, wanted.last), wanted.sources, spans)
        fits = self.make_room(node, (wanted.last,), wanted.need)
        guard.let_go(tree)
        return fits

    @staticmethod
    def _below_promises(node: Node) -> bool:
        """Whether pages above `node` are only promised: they may be withdrawn, and it with them."""
        at = node.parent
        while at is not None:
            if at.promised and any(promise.first < promise.last for promise in at.promised):
                return True
            at = at.parent
        return False

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

    def _keep(self, node: Node, boundaries: tuple[int, ...]) -> PinHolder:
        tree = self.tree
        kept: dict[tuple[int, int], bytes] = {}
        spans = {
            (HOST, g): [
                run
                for boundary in boundaries
                for run in host_runs(tree, node, g, tree.families[g].pages_read(boundary * tree.page_size))
            ]
            for g in tree.sliding
        }
        for g in tree.slots:
            slots = [
                slot.to_bytes(4, "little")
                for depth in boundaries
                if 0 < depth <= node.end
                and (slot := (tree.node_at(node, depth).copies[HOST].pages[g] or {}).get(depth))
            ]
            if slots:
                kept[HOST, g] = b"".join(slots)
        return hold(tree, node, (HOST,), (0, max(boundaries)), kept, spans)

    def _to_save(
        self, node: Node, low: int, high: int, where: dict[int, Ranges], sources: dict[tuple[int, int], bytes]
    ) -> None:
        """Put down which closed pages and snapshots of `node` in [low, high), counted from its start, host does not
        have."""
        start, there, busy = node.start, node.copies[DEVICE].pages, node.promised or node.saving
        host = node.copies[HOST]
        kept = host.pages
        first = host.count if host.count > low else low
        if first < high:
            for g in self.closed:
                if there[g]:
                    ids = bytes(there[g][4 * first : 4 * high])
                    if busy:
                        for column, run in self._unsaved(node, g, first, ids, None):
                            _put_down(g, column, run, where, sources)
                    else:
                        _put_down(g, start + first, ids, where, sources)
        low, high = start + low, start + high
        for g in self.slots:
            slots, saved = there[g], kept[g] or ()
            new: list[int] = []
            for depth in reversed(slots) if slots else ():  # the deepest first: a chat may have had thousands of turns
                if depth <= low:
                    break
                if depth <= high and depth not in saved and not (busy and self._under_way(node, g, depth)):
                    new.append(depth)
            for depth in reversed(new):
                _put_down(g, depth - 1, _raw(slots[depth]), where, sources)

    def _to_save_of_windows(
        self, g: int, span: Span, last: int, least: int, where: dict[int, Ranges], sources: dict[tuple[int, int], bytes]
    ) -> None:
        """Of a group that slides: what a later request can begin with, at the end of this span or before it, if it is
        worth `least` or more. Where all pages are worth the same, all of them."""
        tree, node = self.tree, span.node
        before = reach(tree, g)
        for at, low, high in reversed(tree.cover(node, max(0, span.first - before), last)):
            ids = (at.copies[DEVICE].pages[g] or b"")[4 * low : 4 * high]
            if not ids:
                continue
            kept = at.copies[HOST].pages[g]
            # Four zero bytes in a row are a hole, or two ids beside each other: only then look closer.
            if before:
                wanted = worth(tree, g, at)[low : low + len(ids) // 4] >= least
                wanted[max(0, last - tree.families[g].protected_tail_pages() - at.start - low) :] = (
                    True  # the span's last window
                )
            elif at.promised or at.saving or HOLE in ids or (kept and any(kept[4 * low : 4 * high])):
                wanted = np.ones(len(ids) // 4, np.bool_)
            else:
                _put_down(g, at.start + low, bytes(ids), where, sources)
                continue
            if wanted.any():
                for column, run in self._unsaved(at, g, low, bytes(ids), wanted):
                    _put_down(g, column, run, where, sources)

    def _closed_on_host(self, node: Node, depth: int) -> bool:
        """Whether host has the closed pages above `depth` of the path to `node`, or is getting them: else nobody could
        begin there, whatever else it has."""
        if not self.closed or not depth:
            return True
        at = self.tree.node_at(node, depth)
        there = at.copies[HOST].count >= depth - at.start
        return there or any(save.covers(self.closed[0], depth - 1) for save in at.saving or ())

    @staticmethod
    def _under_way(node: Node, g: int, depth: int) -> bool:
        """Whether a save of the snapshot at `depth` in `node` is under way."""
        return node.saving is not None and any(save.covers(g, depth - 1) for save in node.saving)

    def _unsaved(
        self, node: Node, g: int, first: int, ids: bytes, wanted: npt.NDArray[np.bool_] | None
    ) -> list[tuple[int, bytes]]:
        """Which of `ids`, the device pages of `node` from `first` on, should be saved, of all or of those `wanted`: the
        careful way to look."""
        tree = self.tree
        closed = g in tree.closed
        pages = np.frombuffer(ids, np.int32)
        want = pages != 0
        if wanted is not None:
            want &= wanted
        there = node.copies[HOST].pages[g]
        if not closed and there is not None:
            saved = np.frombuffer(bytes(there), np.int32)[first : first + len(pages)]
            want[: len(saved)] &= saved == 0
        begin = node.start + first
        for at in want.nonzero()[0].tolist() if node.promised or node.saving else ():
            for promise in node.promised or ():
                if promise.covers(g, begin + at, closed):
                    want[at] = False
            for save in node.saving or ():
                if save.covers(g, begin + at):
                    want[at] = False
        return [(begin + low, ids[4 * low : 4 * high]) for low, high in runs_of(want)]

    def save_done(self, op: int, ok: bool) -> Span | None:
        """The save is over. Returns what host has now, for a backup, or None if it failed or has nowhere to go."""
        transfer = self.ledger.end(op, HOST)
        tree, ledger = self.tree, self.ledger
        if transfer.detached:
            ledger.counts["saves_failed"] += not ok
            ledger.free_targets(transfer)
            transfer.let_go(tree)
            return None
        for node, _, _ in tree.cover(transfer.node, transfer.first, transfer.last):
            saving = node.saving
            assert saving is not None
            node.saving = None if len(saving) == 1 else [save for save in saving if save is not transfer]
        if not ok:
            ledger.counts["saves_failed"] += 1
            ledger.free_targets(transfer)
            transfer.let_go(tree)
            return None
        ledger.land(transfer, "saved")
        transfer.let_go(tree)
        return Span(transfer.first, transfer.last, transfer.node)


def _put_down(g: int, column: int, ids: bytes, where: dict[int, Ranges], sources: dict[tuple[int, int], bytes]) -> None:
    """Add a run of pages of a group, which stands behind those that are there."""
    end = column + len(ids) // 4
    if g not in where:
        where[g], sources[DEVICE, g] = [(column, end)], ids
        return
    spots = where[g]
    if spots[-1][1] == column:
        spots[-1] = (spots[-1][0], end)
    else:
        spots.append((column, end))
    sources[DEVICE, g] += ids
