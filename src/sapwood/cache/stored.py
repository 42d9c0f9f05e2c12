"""The store's side of the cache: fetches bring pages to host, backups take them from there. No byte moves here.

A fetch owns the host pages it writes and holds nothing else. When it is over, its tokens are walked again: every page
lands under its own tokens, at its own place, or is freed, however the tree has changed meanwhile. A backup holds
the host pages it reads until it is acknowledged, and the path to them with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .arguments import whole_number
from .group import DEVICE, HOST
from .hashes import chain, digests_of, divided, ensure_hashes, hash_path, last_digest
from .lease import Binding, PinHolder, Span, hold
from .match import Matcher
from .namespace import Namespace
from .node import Node
from .page_ids import Ids, Ranges, Run, as_ids, joined, part, present, ranges, runs_of, spread
from .path import Path
from .pool import FLIGHT
from .roots import Root
from .save import Saves
from .transfer import PendingTransfers, Transfer
from .tree import Tree

_MAX_LATER = 256  # spans that wait for pages above them; beyond it the oldest is dropped, and counted
_MAX_TRIED_AGAIN = 4  # waiting spans that are tried with every save: a fetch may have brought what they wait for


class StoreOperation(NamedTuple):
    """What a caller carries out between store and host: hashes of the pages from `start_page` on, and for each group
    its host pages, one entry a page; 0 = no part there. A snapshot stands at the end of its page."""

    op: int
    namespace: Namespace
    start_page: int
    hashes: list[bytes]
    pages: dict[str, Ids]


class MissingPages(NamedTuple):
    """The pages of a prompt that are not at hand: hashes from page `first` on, to the last that could be served."""

    first: int
    hashes: list[bytes]


class _Later(NamedTuple):
    """A span that was saved, but host lacks page `gap` above it: to be backed up when it has that."""

    gap: int
    span: Span


class Fetch(NamedTuple):
    """A fetch between its begin and its acknowledgement: pages [first, last) of these tokens."""

    op: int
    root: Root
    tokens: bytes
    first: int
    last: int
    targets: dict[int, Ids]
    ranges: dict[int, Ranges]


class StoreFetches:
    def __init__(self, tree: Tree, matcher: Matcher, transfers: PendingTransfers, saves: Saves) -> None:
        self.tree = tree
        self.matcher = matcher
        self.transfers = transfers
        self.saves = saves
        self.fetches: dict[int, Fetch] = {}
        self.backups: dict[int, PinHolder] = {}
        self.later: list[_Later] = []
        self.whole = saves.everything  # what no group could be served from host, is not fetched

    # ---- questions

    def missing(self, binding: Binding, tokens: bytes, least: int) -> MissingPages | None:
        """What of a prompt is at hand neither on the device nor on host. None if it is fewer than `least` pages, or
        could not be fetched."""
        root, last = binding._root, self.matcher.most_pages(len(tokens) // 4)
        if not root.attached or not self.whole or last < least:
            return None
        first = self.matcher.match(binding, tokens, HOST).boundary
        if last - first < max(1, least):
            return None
        return MissingPages(first, self.hashes(root, tokens, first, last))

    def hashes(self, root: Root, tokens: bytes, first: int, last: int) -> list[bytes]:
        """The hashes of pages [first, last) of a prompt; those before them are looked up in the tree if it has them."""
        size = self.tree.page_bytes
        path = self.tree.walk(root, tokens[: first * size])
        if first and path.depth == first:
            node = path.nodes[-1]
            upto = first - node.start
            parent = digests_of(ensure_hashes(node, upto, size), upto - 1, upto)
        else:
            parent = root.digest
            if first:
                parent = last_digest(chain(parent, tokens[: first * size], size))
        return divided(chain(parent, tokens[first * size : last * size], size))

    def servable_run(self, start: int, there: Mapping[str, npt.NDArray[Any]]) -> int:
        """How many pages from `start` on all groups could be served, if the store had the pages of `there`."""
        tree = self.tree
        view = _Imagined(tree, start, there)
        # A prompt may end with these pages, unless a group of slots leaves a token to compute: both must be served.
        boundary, _ = self.matcher.boundary(view, view.depth * tree.page_size + bool(tree.slots))
        return max(0, boundary - start)

    # ---- fetches

    def begin_fetch(
        self, binding: Binding, tokens: bytes, first: int, last: int, hashes: Sequence[bytes] | None
    ) -> StoreOperation | None:
        self._check(tokens, first, last)
        tree, root = self.tree, binding._root
        node = self._above(root, tokens, first)
        if node is None:
            return None
        where = self._where(first, last, len(tokens) // 4)
        need = _sizes(where)
        if hashes is None:
            hashes = self.hashes(root, tokens, first, last)
        if not tree.tiers[HOST].has_free(need) and not self.saves.make_room(node, (first, last), need):
            self.transfers.counts["fetches_skipped"] += 1
            return None
        targets = {
            g: as_ids(spread(spans, tree.tiers[HOST].pools[g].allocate(need[g], FLIGHT), first, last))
            for g, spans in where.items()
        }
        op = self.transfers.number()
        self.fetches[op] = Fetch(op, root, tokens[: last * tree.page_bytes], first, last, targets, where)
        self.transfers.counts["fetches"] += 1
        pages = {tree.groups[g].name: ids for g, ids in targets.items()}
        return StoreOperation(op, root.namespace, first, list(hashes), pages)

    def fetchable_run(self, binding: Binding, tokens: bytes, first: int, last: int) -> int:
        """For how many of the pages [first, last), from the first on, `begin_fetch` would find room."""
        self._check(tokens, first, last)
        tree = self.tree
        node = self._above(binding._root, tokens, first)
        if node is None:
            return 0

        def too_much(end: int) -> bool:
            need = _sizes(self._where(first, end, len(tokens) // 4))
            return not tree.tiers[HOST].has_free(need) and not self.saves.can_make_room(node, (first, end), need)

        return bisect_left(range(first + 1, last + 1), True, key=too_much) if too_much(last) else last - first

    def _check(self, tokens: bytes, first: int, last: int) -> None:
        """ValueError if [first, last) are not pages of a prompt that could be served."""
        whole_number("first", first, 0, 1 << 30)
        whole_number("last", last, first + 1, max(first + 1, self.matcher.most_pages(len(tokens) // 4)))

    def _above(self, root: Root, tokens: bytes, first: int) -> Node | None:
        """The node that fetched pages from `first` on would follow; None if no request could reach them there."""
        tree = self.tree
        if not root.attached or not self.whole:
            return None
        path = tree.walk(root, tokens[: first * tree.page_bytes])
        if tree.closed and path.deepest_closed(first) < first:
            return None
        return path.nodes[-1] if path.nodes else root.top

    def _where(self, first: int, last: int, length: int) -> dict[int, Ranges]:
        """By group: the pages of [first, last) without which a prompt of `length` tokens cannot begin at `last`."""
        tree = self.tree
        where: dict[int, Ranges] = {}
        for g, family in enumerate(tree.families):
            if g in tree.closed:
                where[g] = [(first, last)]
            elif g in tree.slots:
                where[g] = [(last - 1, last)]
            else:
                spans = _within(family.columns(last, length), first, last)
                if spans:
                    where[g] = spans
        return where

    def fetch_done(self, op: int, ok: bool, pages: int) -> bool:
        """The fetch is over. Returns whether any of it has landed."""
        fetch = self.fetches.get(op)
        if fetch is None:
            raise ValueError(f"no fetch with number {op!r} is under way")
        if not 0 <= pages <= fetch.last - fetch.first:
            raise ValueError(f"pages must be an integer from 0 to {fetch.last - fetch.first}, got {pages}")
        del self.fetches[op]
        first = fetch.first
        end = self._landable(fetch, first + pages) if ok else first
        for g, targets in fetch.targets.items():
            rest = targets[end - first :]
            self.tree.tiers[HOST].pools[g].release(present(rest.tobytes()), FLIGHT)
        landed = self._land(fetch, end) if end > first else 0
        self.transfers.counts["fetches_failed"] += not landed
        return landed > 0

    def _landable(self, fetch: Fetch, end: int) -> int:
        """How far pages up to `end` can land. Not where something above them is gone: no request could reach them. And
        not on pages that a step in flight has only promised: they go, with all that is below, if it fails."""
        tree, root, first = self.tree, fetch.root, fetch.first
        if not root.attached:
            return first
        if not tree.closed:
            return end
        path = tree.walk(root, fetch.tokens[: end * tree.page_bytes])
        if path.deepest_closed(path.depth) < first:
            return first
        if path.nodes:
            end = min(end, tree.first_promised(path.nodes[-1]))
        return max(first, end)

    def _land(self, fetch: Fetch, end: int) -> int:
        """Pages up to `end` become the tree's, as those of a save do. Returns how many."""
        tree, first = self.tree, fetch.first
        node = self._grown(fetch.root, fetch.tokens[: end * tree.page_bytes], end)
        where = {g: spans for g, all_of in fetch.ranges.items() if (spans := _within(all_of, first, end))}
        nothing = np.zeros(0, np.int32)
        parts = {g: (nothing, fetch.targets[g][: end - first]) for g in where}
        came = {g: targets[targets != 0].tobytes() for g, (_, targets) in parts.items()}
        transfer = Transfer(tree, fetch.op, HOST, node, (first, end), parts, where, came, (HOST,), {}, {})
        landed = self.transfers.land(transfer, "fetched")
        transfer.let_go(tree)  # a node that nothing came for is swept now
        return landed

    def _grown(self, root: Root, tokens: bytes, end: int) -> Node:
        """A node on the path of `tokens` that reaches `end`; what of the path is not there is attached, empty."""
        tree = self.tree
        path = tree.walk(root, tokens)
        if path.depth < end:
            above = tree.node_ending(path.nodes[-1], path.depth) if path.nodes else root.top
            return tree.attach(above, tokens[path.depth * tree.page_bytes :], end - path.depth)
        node = path.nodes[-1]
        if tree.closed and node.end > end and not node.copies[HOST].count and not node.copies[DEVICE].count:
            return tree.split(node, end - node.start)  # empty and held: it gets all pages or none
        return node

    # ---- backups

    def begin_backups(self, span: Span) -> list[StoreOperation]:
        """Start to back up what host has of `span`, and of earlier ones that had to wait for pages above them."""
        spans = [later.span for at, later in enumerate(self.later) if at < _MAX_TRIED_AGAIN or _fills(span, later)]
        self.later = [
            later for at, later in enumerate(self.later) if at >= _MAX_TRIED_AGAIN and not _fills(span, later)
        ]
        spans.append(span)
        begun = [operation for each in spans for operation in self._begin_backup(each)]
        dropped = max(0, len(self.later) - _MAX_LATER)
        self.transfers.counts["backups_dropped"] += dropped
        del self.later[:dropped]
        return begun

    def _begin_backup(self, span: Span) -> list[StoreOperation]:
        tree, node, first = self.tree, span.node, span.first
        if not node.alive or not node.root.attached:
            return []
        last = min(span.last, node.end)
        if tree.closed:
            # Only what host has from the root on, without a gap, can be held there: a node above that is on the device
            # alone may have to go, and takes with it what is below.
            whole = tree.closed_pages.whole(node, HOST)
            if whole < last and self._any_on_host(node, max(first, whole), last):
                self.later.append(_Later(whole, Span(max(first, whole), last, node)))
            last = min(last, whole)
        if first >= last:
            return []
        anchor = tree.cover(node, last - 1, last)[0][0]
        host = anchor.copies[HOST]
        if tree.closed and host.count < anchor.n:
            anchor = tree.split(anchor, host.count)
        found = self._on_host(anchor, first, last)
        if not found:
            return []
        where = {g: ranges(pieces) for g, pieces in found.items()}
        first = min([spans[0][0] for spans in where.values()])
        last = max([spans[-1][1] for spans in where.values()])
        held = {(HOST, g): joined(pieces) for g, pieces in found.items()}
        op = self.transfers.number()
        spans = {(HOST, g): where[g] for g in tree.sliding if g in where}
        self.backups[op] = hold(tree, anchor, (HOST,), (first, last), held, spans)
        self.transfers.counts["backups"] += 1
        pages = {tree.groups[g].name: as_ids(spread(where[g], ids, first, last)) for (_, g), ids in held.items()}
        hashes = divided(hash_path(tree, anchor, first, last))
        return [StoreOperation(op, node.root.namespace, first, hashes, pages)]

    def backup_done(self, op: int, ok: bool) -> Span | None:
        holder = self.backups.pop(op, None)
        if holder is None:
            raise ValueError(f"no backup with number {op!r} is under way")
        self.transfers.counts["backups_failed"] += not ok
        holder.let_go(self.tree)
        return None if ok or holder.detached else Span(*holder.columns, holder.node)

    def _any_on_host(self, node: Node, first: int, last: int) -> bool:
        return any(at.copies[HOST].count > low for at, low, _ in self.tree.cover(node, first, last))

    def _on_host(self, node: Node, first: int, last: int) -> dict[int, list[Run]]:
        """By group: the host pages of [first, last) on the path to `node`, root side first."""
        tree = self.tree
        found: dict[int, list[Run]] = {}
        for at, low, high in reversed(tree.cover(node, first, last)):
            for g, pages in enumerate(at.copies[HOST].pages):
                if not pages:
                    continue
                pieces = found.setdefault(g, [])
                if g in tree.slots:
                    begin, end = at.start + low, at.start + high
                    inside = sorted([depth for depth in pages if begin < depth <= end])
                    pieces += [(depth - 1, pages[depth].to_bytes(4, "little")) for depth in inside]
                    continue
                ids = as_ids(part(pages, low, high))
                begin = at.start + low
                for a, b in runs_of(ids):
                    pieces.append((begin + a, ids[a:b].tobytes()))
        return {g: pieces for g, pieces in found.items() if pieces}


def _fills(span: Span, later: _Later) -> bool:
    """Whether what was saved is what a span waits for: the page above it that host lacked, on the same path."""
    if not span.first <= later.gap < span.last:
        return False
    one, other = (_node_at(node, later.gap) for node in (span.node, later.span.node))
    return one is other


def _node_at(node: Node, page: int) -> Node:
    """The node on the path to `node` that has this page; or the last, if it ends before."""
    while node.start > page and node.parent is not None:
        node = node.parent
    return node


class _Imagined(Path):
    """A path on which everything before `start` is at hand, and beyond it what a store may have."""

    __slots__ = ("start", "there")

    def __init__(self, tree: Tree, start: int, there: Mapping[str, npt.NDArray[Any]]) -> None:
        self.tree = tree
        self.start = start
        self.there = [np.asarray(there.get(group.name, ()), np.bool_) for group in tree.groups]
        self.depth = start + max([len(pages) for pages in self.there], default=0)

    def last_missing(self, index: int, low: int, high: int) -> int:
        pages = self.there[index]
        for column in range(high - 1, max(low, self.start) - 1, -1):
            at = column - self.start
            if at >= len(pages) or not pages[at]:
                return column
        return -1

    def deepest_closed(self, limit: int) -> int:
        run = self.depth - self.start
        for g in self.tree.closed:
            pages = self.there[g]
            gaps = (~pages).nonzero()[0]
            run = min(run, int(gaps[0]) if len(gaps) else len(pages))
        return min(limit, self.start + run)

    def deepest_slot(self, index: int, limit: int) -> int:
        at = self.there[index][: max(0, limit - self.start)].nonzero()[0]
        return self.start + int(at[-1]) + 1 if len(at) else self.start


def _sizes(where: Mapping[int, Ranges]) -> dict[int, int]:
    """How many pages of each group that is."""
    return {g: sum([high - low for low, high in spans]) for g, spans in where.items()}


def _within(spans: Ranges, first: int, last: int) -> Ranges:
    """The parts of `spans` that lie in [first, last)."""
    cut = [(max(low, first), min(high, last)) for low, high in spans]
    return [(low, high) for low, high in cut if low < high]
