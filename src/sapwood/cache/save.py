"""Saves: which real pages host does not have, room for them there, and what is visible once they have arrived.

Most saves are short: a few nodes, some pages of each. So pages are gathered and landed as runs (a column and the bytes
of its ids), node by node, and owners and readers change once a group. numpy looks at a node only where something in it
is in the way: a hole, a page host has already, a promise, another save under way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .group import DEVICE, HOST
from .lease import PinHolder, Span, hold
from .node import Node
from .page_ids import PageIds, Ranges, as_ids, has_hole, mask_runs, one, part, spread, width
from .pool import FLIGHT
from .publish import Publisher
from .sliding import NEAR, WINDOW
from .transfer import Operation, Parts, PendingTransfers, Transfer, host_runs
from .tree import Cover, Tree

_AT_LEAST = [bytes([worth >= least for worth in range(256)]) for least in range(3)]  # by least worth: worths to masks


class Wanted(NamedTuple):
    """Device pages to be saved: by group where they stand and which they are, how many, and in which columns."""

    where: dict[int, Ranges]
    sources: dict[tuple[int, int], bytes]
    need: dict[int, int]
    first: int
    last: int

    def windows(self, saves: Saves) -> dict[tuple[int, int], Ranges]:
        """Where its pages of sliding groups stand, as a `PinHolder` has them."""
        return {(DEVICE, g): self.where[g] for g in saves.sliding if g in self.where}


class Saves:
    def __init__(self, tree: Tree, transfers: PendingTransfers, publisher: Publisher) -> None:
        self.tree = tree
        self.transfers = transfers
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
        tree, bottom = self.tree, span.node
        if not tree.has_host or bottom.parent is None or not bottom.root.attached:
            return None
        last = min(span.last, bottom.end)
        path = tree.cover(bottom, span.first, last)
        if tree.first_promised(bottom) < (path[-1][0] if path else bottom).start:
            self.publisher.real.append(span)  # to be offered again with the next step: it will be known then
            return None
        host, left_out = tree.tiers[HOST], 0
        guard: PinHolder | None = None
        for least in (NEAR, WINDOW):  # a small host may have room for what is worth most
            wanted = self._wanted(span, path, last, least)
            if wanted is None:
                self.transfers.counts["pages_skipped"] += left_out
                return None
            count = sum(wanted.need.values())
            left_out = max(left_out, count)
            # Of a node behind them with nothing but host pages, nothing is left when these make room.
            node = tree.node_at(bottom, wanted.last)
            if host.has_free(wanted.need):
                break
            guard = hold(tree, node, (DEVICE,), (wanted.first, wanted.last), wanted.sources, wanted.windows(self))
            if self.make_room(node, (wanted.last,), wanted.need):
                break
            guard.let_go(tree)
            guard = None
        else:
            self.transfers.counts["saves_skipped"] += 1
            self.transfers.counts["pages_skipped"] += left_out
            return None
        self.transfers.counts["pages_skipped"] += left_out - count
        transfer = self._transfer(node, wanted)
        if guard is not None:
            guard.let_go(tree)
        return self.transfers.begin(transfer)

    def _transfer(self, node: Node, wanted: Wanted) -> Transfer:
        """The save of what is wanted, for which host has room. It marks the nodes that it reads from."""
        tree, first, last = self.tree, wanted.first, wanted.last
        pools = tree.tiers[HOST].pools
        parts: Parts = {}
        came = {}
        for (_, g), source in wanted.sources.items():
            target = came[g] = pools[g].allocate(wanted.need[g], FLIGHT)
            where = wanted.where[g]
            parts[g] = as_ids(spread(where, source, first, last)), as_ids(spread(where, target, first, last))
        node.tried = node.copies[DEVICE].used
        op, columns, spans = self.transfers.number(), (first, last), wanted.windows(self)
        transfer = Transfer(tree, op, HOST, node, columns, parts, wanted.where, came, (DEVICE,), wanted.sources, spans)
        for at, _, _ in tree.cover(node, first, last):
            at.saving = [*at.saving, transfer] if at.saving else [transfer]
        return transfer

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
            need[g] = width(sources[DEVICE, g])
        return Wanted(where, sources, need, first, end)

    def cold_spans(self, most: int) -> list[Span]:
        """What the device is going to lose next for good, if fewer than an eighth of its pages are free: up to `most`
        spans worth saving first. Empty where no group is closed."""
        tree = self.tree
        if not tree.has_host or not tree.closed:
            return []
        pools = [tree.device.pools[g] for g in tree.closed]
        if all(8 * pool.free >= pool.capacity for pool in pools):
            return []
        leaves = tree.device.leaves.coldest(DEVICE, 4 * most)
        # Once for each time it was used: on a small host two of them would push each other out in turns, for ever.
        fresh = [leaf for leaf in leaves if leaf.tried < leaf.copies[DEVICE].used and not leaf.saving]
        lost = [leaf for leaf in fresh if leaf.copies[HOST].count < leaf.n]
        # On host a page is worth nothing without its path.
        return [Span(0, leaf.end, leaf) for leaf in lost[:most]]

    def make_room(self, node: Node, boundaries: tuple[int, ...], need: dict[int, int]) -> bool:
        """Evict from host what is least recently used, but nothing of the path that is about to be extended there: of
        the path to `node`, what requests that begin at these boundaries would read."""
        holder = self._keep(node, boundaries)
        fits = self.tree.tiers[HOST].try_make(need)
        holder.let_go(self.tree)
        return fits

    def can_make_room(self, node: Node, boundaries: tuple[int, ...], need: dict[int, int]) -> bool:
        """Would `make_room` succeed? Nothing goes."""
        holder = self._keep(node, boundaries)
        fits = self.tree.tiers[HOST].can_make(need)
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
        start, there, host = node.start, node.copies[DEVICE].pages, node.copies[HOST]
        first = host.count if host.count > low else low
        if first < high:
            for g in self.closed:
                ids = bytes(part(there[g], first, high))
                self._put_unsaved(node, g, first, ids, bytearray(b"\1" * width(ids)), where, sources)
        low, high = start + low, start + high
        for g in self.slots:
            slots, saved = there[g], host.pages[g] or ()
            new: list[int] = []
            for depth in reversed(slots) if slots else ():  # the deepest first: a chat may have had thousands of turns
                if depth <= low:
                    break
                if depth <= high and depth not in saved and not self._under_way(node, g, depth):
                    new.append(depth)
            for depth in reversed(new):
                _put_down(g, depth - 1, one(slots[depth]), where, sources)

    def _to_save_of_windows(
        self, g: int, span: Span, last: int, least: int, where: dict[int, Ranges], sources: dict[tuple[int, int], bytes]
    ) -> None:
        """Of a group that slides: what a later request can begin with, at the end of this span or before it, if it is
        worth `least` or more. Where all pages are worth the same, all of them."""
        tree = self.tree
        sliding = tree.sliding_pages[g]
        for at, low, high in reversed(tree.cover(span.node, max(0, span.first - sliding.reach), last)):
            ids = bytes(part(at.copies[DEVICE].pages[g] or b"", low, high))
            if not ids:
                continue
            n = width(ids)
            wanted = bytearray(b"\1" * n)
            if sliding.reach:
                own = max(0, last - sliding.window - at.start - low)  # where the span's last window begins
                wanted[:own] = sliding.worth(at)[low : low + min(own, n)].translate(_AT_LEAST[least])
            if has_hole(ids):
                _mask(wanted, as_ids(ids) != 0)
            kept = part(at.copies[HOST].pages[g] or b"", low, low + n)
            if any(kept):
                _mask(wanted, as_ids(kept) == 0)
            self._put_unsaved(at, g, low, ids, wanted, where, sources)

    def _closed_on_host(self, node: Node, depth: int) -> bool:
        """Whether host has the closed pages above `depth` of the path to `node`, or is getting them: else no request
        could begin there."""
        if not self.closed or not depth:
            return True
        at = self.tree.node_at(node, depth)
        there = at.copies[HOST].count >= depth - at.start
        return there or any(save.covers(self.closed[0], depth - 1) for save in at.saving or ())

    @staticmethod
    def _under_way(node: Node, g: int, depth: int) -> bool:
        """Whether a save of the snapshot at `depth` in `node` is under way."""
        return node.saving is not None and any(save.covers(g, depth - 1) for save in node.saving)

    def _put_unsaved(
        self,
        node: Node,
        g: int,
        first: int,
        ids: bytes,
        wanted: bytearray,
        where: dict[int, Ranges],
        sources: dict[tuple[int, int], bytes],
    ) -> None:
        """Put down which of `ids`, the device pages of `node` from `first` on, are to be saved: those that are wanted,
        real, and not on their way."""
        begin = node.start + first
        taken: Ranges = []
        for promise in node.promised or ():
            taken += promise.ranges(g, g in self.closed)
        for save in node.saving or ():
            taken += save.ranges.get(g, ())
        for low, high in taken:
            low, high = max(low - begin, 0), min(high - begin, len(wanted))
            if low < high:
                wanted[low:high] = bytes(high - low)
        for low, high in mask_runs(wanted):
            _put_down(g, begin + low, part(ids, low, high), where, sources)

    def save_done(self, op: int, ok: bool) -> Span | None:
        """The save is over. Returns what host has now, for a backup, or None if it failed or has nowhere to go."""
        transfer = self.transfers.end(op, HOST)
        tree, transfers = self.tree, self.transfers
        if transfer.detached:
            transfers.counts["saves_failed"] += not ok
            transfers.free_targets(transfer)
            transfer.let_go(tree)
            return None
        for node, _, _ in tree.cover(transfer.node, transfer.first, transfer.last):
            saving = node.saving
            assert saving is not None
            node.saving = None if len(saving) == 1 else [save for save in saving if save is not transfer]
        if not ok:
            transfers.counts["saves_failed"] += 1
            transfers.free_targets(transfer)
            transfer.let_go(tree)
            return None
        transfers.land(transfer, "saved")
        transfer.let_go(tree)
        return Span(transfer.first, transfer.last, transfer.node)


def _put_down(
    g: int, column: int, ids: PageIds, where: dict[int, Ranges], sources: dict[tuple[int, int], bytes]
) -> None:
    """Add a run of pages of a group, which stands behind those that are there."""
    end = column + width(ids)
    if g not in where:
        where[g], sources[DEVICE, g] = [(column, end)], bytes(ids)
        return
    spots = where[g]
    if spots[-1][1] == column:
        spots[-1] = (spots[-1][0], end)
    else:
        spots.append((column, end))
    sources[DEVICE, g] += ids


def _mask(wanted: bytearray, there: npt.NDArray[np.bool_]) -> None:
    """Want only those of the first pages that are `there`."""
    view = np.frombuffer(wanted, np.bool_)[: len(there)]
    view &= there
